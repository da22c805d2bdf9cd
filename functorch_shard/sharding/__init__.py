"""From whole parameters to shards and back: ``shard``, ``gather``, ``scatter_grads`` and what they are made of.

The verbs: ``gather``, ``scatter``, ``shard``, ``partition``, ``reshard``, ``iter_parameters``, ``gather_on_rank``;
``slicing``: whole buffers to shards. How a gather and its reduction are done:
``data_parallel`` differentiates them by their schedule; ``lazy_gather`` (autograd) makes ``lazy_tensor`` objects;
``prefetch_policy`` decides which unit is gathered next and which is freed, ``gathered_units`` holds them,
``asynchronous`` starts gathers and reductions that are waited for later, on ``streams``; ``reduction`` reduces at once,
and ``unused`` knows what a rank did not use. ``overlapped_means``: the mean over replicas, taken during backward.

Imports ``collectives``, ``storage`` and below; imported by ``training`` and ``checkpoint``.
"""
