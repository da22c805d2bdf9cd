"""The command line, ``python -m functorch_shard`` or ``functorch-shard``: what needs no program of one's own.

``main``: the commands and their options, and ``plan``, a model on numbers of ranks that need not be there.
``checkpoints``: ``inspect``, ``verify``, ``digest`` and ``consolidate``. Uses the public names of the library and the
files of ``checkpoint``, which is loaded when a command reads one.
"""
