"""Optimizers of whole parameters: each parameter has an owner, which updates it for all ranks of the shard axis.

``owners``: which rank, by work. ``probe``: whether a class can do this, and what it keeps for a parameter. ``plan``:
what is sent between ranks in which rounds, and where state is; integers only. ``exchange``: the messages. ``state``:
the state of one parameter inside of the leaf of all. ``step``: a step on plain tensors; ``call``: both on the trees of
users; ``rule``: a class with the options of a call. ``optimizer`` has the verbs.

Imports ``layout``, ``storage``, ``communication`` and the other parts of ``training``; ``optimizer`` imports it.
"""
