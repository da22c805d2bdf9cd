"""The same bits on any number of ranks: programs of V virtual ranks that run on N real ones, where N divides V.

A layout of ``plan(model, mesh, virtual_ranks=V)`` has buffers of the same length, cut at the same places, for any N.
``loop``: the gradient of the mean over virtual ranks, added up in a tree that depends on V alone; ``keys``: random
numbers of a virtual rank. Norms add up in such an order by themselves. Imports ``training`` and what is below;
``fs.virtual`` loads it on first use.
"""

from .keys import Key, key
from .loop import grad, grad_and_value, mean, ranks

__all__ = ["Key", "grad", "grad_and_value", "key", "mean", "ranks"]
