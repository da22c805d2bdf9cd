"""From whole parameters to shards and back: ``shard``, ``gather``, ``scatter_grads`` and what they are made of.

A training step on real ranks goes through ``gather`` (its autograd nodes), ``lazy_tensor`` (what a model gets),
``session`` (the whole units: when they are gathered and freed) and ``reduction`` (gradients, while backward goes on).
``scatter`` reduces full gradients at once: ``scatter_grads`` and ``accumulate``. ``shard`` cuts whole
buffers; ``partition`` and ``merge`` are there. ``reshard`` is loaded on first use, and so are
``overlapped_means``, the mean over replicas, taken during backward, and ``varying``: over which axes values vary, for
``fs.debug``.

Imports ``collectives``, ``storage`` and below; imported by ``training`` and ``checkpoint``.
"""
