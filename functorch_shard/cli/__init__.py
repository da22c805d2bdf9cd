"""The command line, ``python -m functorch_shard`` or ``functorch-shard``: what needs no program of one's own.

``main``: the commands and their errors, of one line each. ``plans``: ``plan``, a model on numbers of ranks that need
not be there; ``options``: texts of its options as values. ``checkpoints``: ``inspect`` and ``consolidate``.
``differences``: ``verify`` and ``diff``. ``progress``: how far a command is, on a terminal. A command imports what it
uses when it runs. Uses the public names of the library and the files of ``checkpoint``.
"""
