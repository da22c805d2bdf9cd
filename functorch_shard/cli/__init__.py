"""The command line, ``python -m functorch_shard`` or ``functorch-shard``: what needs no program of one's own.

``main``: the commands, their options, and their errors, of one line each. ``plans``: ``plan``, a model on numbers of
ranks that need not be there. ``checkpoints``: ``inspect``, ``verify`` and ``consolidate``. A command imports what it
uses when it runs. Uses the public names of the library and the files of ``checkpoint``.
"""
