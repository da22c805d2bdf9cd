"""Checkpoints in the format of ``torch.distributed.checkpoint``; reading executes nothing.

``reader``, ``validation`` and ``writer``: the directory of one checkpoint. ``metadata``: ``.metadata``, torch's index.
``manifest``: ``functorch_shard.json``, checksums. ``values`` and ``unpickler``: tensors and plain values from pickles
of untrusted sources.
"""
