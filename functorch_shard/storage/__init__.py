"""Memory kinds of tensors: on a device, on the host, or pinned there.

``memory_kind``: the kind of a tensor, and tensors of the same kind. ``offloading``: ``offload``.

Imports ``collectives``, ``layout`` and below; imported by ``sharding``, ``training`` and ``checkpoint``.
"""
