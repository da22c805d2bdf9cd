"""Reads and writes Hugging Face's safetensors files, in parts.

``files``: ``import_safetensors`` and ``export_safetensors``. ``format``: the header of one file. ``sources``: the files
of a path. ``writer``: a new directory of files.
"""
