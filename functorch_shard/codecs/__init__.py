"""Compressed communication: all-gather shards as int8 or float8 blocks, or with your own ``(encode, decode)``.

``gather(params, codec=fs.codecs.int8())`` gathers encoded shards; ``scatter_encoded_grads`` reduces encoded gradients,
with error feedback. A codec is any pair of pure functions: see :class:`Codec`.

``encoding``: int8 and float8, and rows as messages of bytes, what a gather calls; ``gradients``: the encoded reduction.
Imported by ``gather`` where a codec is given; imports ``sharding`` and what is below.
"""

from .encoding import Codec, float8, int8
from .gradients import scatter_encoded_grads

__all__ = ["Codec", "float8", "int8", "scatter_encoded_grads"]
