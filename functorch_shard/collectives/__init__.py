"""Collectives with exact derivatives, under every transform and at every order.

``primitives``: ``psum``, ``pmean``, ``pmax``, ``all_gather``, ``psum_scatter``, ``axis_index``; ``rules``: their
derivatives. ``sinks``: where gradients of gathered parameters go, and who takes the mean over ranks, the backward of
each gather or ``fs.grad`` at its end.

Imports ``mesh``, ``communication`` and below; imported by ``storage``, ``sharding`` and ``training``.
"""

from .primitives import all_gather, axis_index, pmax, pmean, psum, psum_scatter

__all__ = ["all_gather", "axis_index", "pmax", "pmean", "psum", "psum_scatter"]
