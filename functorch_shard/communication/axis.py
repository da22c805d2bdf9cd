"""One axis of a mesh: its name, its size, and the backend that moves bytes between its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..containers import Static
from ..torch_internals.autograd import being_traced, eager
from .backend import Backend, DetachedBackend, Work, Wrap, Wrapped
from .collective import KINDS, Collective, Splits, collective, is_watched, record


@dataclass(frozen=True, eq=False)
class Axis(Static):
    """One named direction of a mesh, for example ``mesh["shard"]``: what a collective communicates over."""

    name: str
    size: int
    backend: Backend = field(repr=False)
    folded: int = field(default=1, repr=False)  # values of other simulated ranks inside an operand; see collectives
    key: str = field(default="", repr=False)  # of the buffer that is communicated

    def __reduce__(self) -> tuple[Any, ...]:
        # A process group is not pickled; a simulated axis is pickled with its mesh.
        rank = 0 if self.backend.simulated else int(self.backend.index())
        return Axis, (self.name, self.size, DetachedBackend(rank))

    def of(self, key: str) -> Axis:
        """The same ranks, for what belongs to buffer ``key``."""
        return replace(self, key=key)

    @eager
    def issue(
        self,
        kind: str,
        x: Tensor,
        *,
        dtype: torch.dtype | None = None,
        key: str = "",
        dim: int = 0,
        device: torch.device | None = None,
        source: int = 0,
        transient: bool = False,
        splits: Splits = (),
    ) -> Work:
        """Start a collective over the ranks of this axis: the only way to one, so that all are counted and checked.

        Args:
            kind: see :class:`Collective`.
            x: the operand, see :class:`Backend`.
            dtype, key, dim, device, source, transient, splits: see :class:`Collective`; the dtype is that of ``x``
                unless given.
        """
        simulated = self.backend.simulated
        numel = x.numel() // max(self.backend.rows(self.size) * self.folded, 1) if simulated else x.numel()
        what = kind, self.name, numel, dtype or x.dtype, key or self.key
        op = collective(*what, dim, device, source, transient, splits)
        if kind in KINDS and KINDS[kind].shape:
            op = replace(op, numel=self._mean_sent(op, x))
        if is_watched():
            if being_traced() and not simulated:
                from .recorded import issue_recorded

                return issue_recorded(op, x, self.size, self.backend)
            record(op)
        return self.backend.issue(op, x)

    def _mean_sent(self, op: Collective, x: Tensor) -> int:
        """What ranks send to others on average, the same number on every rank."""
        shape, of = x.shape[int(self.backend.simulated) :], op.law.shape
        assert of
        pairs = permutations(range(self.size), 2)
        return -(-sum(prod(of(op, shape, i, j)) for i, j in pairs) // (self.size * self.folded))


def wrap(fn: Wrap) -> Callable[[Axis], Backend]:
    """Have ``fn`` called for every collective of a mesh, in whatever thread: ``mesh.with_backend(wrap(fn))``.

    Args:
        fn: ``fn(op, x, send)`` gets the :class:`Collective`, its operand, and what would issue it. It returns a
            :class:`Work`: that of ``send(op, x)``, of another collective or operand, changed by :meth:`Work.then`, or
            one of its own. :class:`Backend` says what ``x`` and the result are, on real and on simulated ranks.

    Returns:
        A function for :meth:`Mesh.with_backend`, from an axis to its backend behind ``fn``. Derivatives are those of
        the true collectives, whose transposes go through ``fn`` as well.

    Cost:
        That of ``fn``. All ranks have to wrap alike. Sequential simulated ranks each call ``fn``.

    Example:
        >>> import dataclasses
        >>> @fs.communication.wrap
        ... def half_sums(op, x, send):
        ...     half = dataclasses.replace(op, dtype=torch.bfloat16)
        ...     return send(half, x.bfloat16()).then(lambda total: total.to(x.dtype))
        >>> mesh = fs.simulated_mesh(2).with_backend(half_sums)
        >>> rows = torch.tensor([256.0, 1.0])   # row r = rank r; bfloat16 has no 257
        >>> mesh.spmd(lambda x: fs.collectives.psum(x, mesh))(rows)
        tensor([256., 256.])
    """
    return lambda axis: Wrapped(axis.backend, fn)
