"""Hugging Face's safetensors files, read and written in parts.

``files``: ``import_safetensors`` and ``export_safetensors``. ``format``: the header of one file. ``sources``: which
files a path names. ``writer``: a new directory of files.
"""
