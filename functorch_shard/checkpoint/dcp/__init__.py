"""The format of ``torch.distributed.checkpoint``, read without trusting it.

``stored``: a checkpoint on the disk. ``metadata`` and ``manifest``: its index and our checksums. ``values`` and
``unpickler``: plain values, without executing what a pickle asks for.
"""
