"""From whole parameters to shards and back: ``shard``, ``gather``, ``scatter_grads`` and what they are made of.

``gather``, ``scatter``, ``shard``: the verbs. ``lazy_tensor``: the tensor that ``gather`` returns, gathered when it is
used; ``use_order``: which units to keep and which to gather next; ``prefetch``: their buffers. ``reduction``: full
gradients to shards; ``unused``: those of units that a rank did not use; ``asynchronous``: gathers and reductions that
are started now and waited for later. ``replicas`` and ``compression``: reductions in two halves, and encoded ones.
``slicing`` and ``one_rank``: whole buffers to shards, and whole parameters on one rank. ``initialize`` and
``module_reset``: ``init_params``. ``reshard``: from one layout to another. ``streams``: streams of a device.

Imports ``collectives``, ``storage`` and below; imported by ``training`` and ``checkpoint``.
"""
