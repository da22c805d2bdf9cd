"""Compressed communication: all-gather shards as int8 or float8 blocks, or with your own ``(encode, decode)``.

``gather(params, codec=fs.codecs.int8())`` gathers encoded shards; ``scatter_encoded_grads`` reduces encoded gradients,
with error feedback. A codec is any pair of pure functions: see :class:`Codec`.
"""

from .collectives.codecs import Codec, float8, int8
from .sharding.compression import scatter_encoded_grads

__all__ = ["Codec", "float8", "int8", "scatter_encoded_grads"]
