"""One axis of a mesh: its name, its size, and the backend that moves bytes between its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..containers import Static
from ..eager import eager
from ..torch_internals.transforms import being_traced
from .backend import Backend, DetachedBackend
from .collective import Splits, collective, record
from .recorded import issue_recorded
from .work import Work


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
        numel = self._mean_sent(x, splits) if splits else self._numel(kind, x)
        what = kind, self.name, numel, dtype or x.dtype, key or self.key
        op = collective(*what, dim, device, source, transient, splits)
        if being_traced() and not self.backend.simulated:
            return issue_recorded(op, x, self.size, self.backend)
        record(op)
        return self.backend.issue(op, x)

    def _numel(self, kind: str, x: Tensor) -> int:
        """Elements of the operand of one rank, or of one row of it."""
        stacked = self.backend.simulated
        if kind == "scatter":
            return x.shape[1 + stacked :].numel() // self.folded
        return x.numel() // max(self.backend.rows(self.size) * self.folded, 1) if stacked else x.numel()

    def _mean_sent(self, x: Tensor, splits: Splits) -> int:
        """What ranks send to others on average, the same number on every rank."""
        rows = x.shape[int(self.backend.simulated) : -1].numel() // self.folded
        return -(-rows * sum(sum(row) - row[rank] for rank, row in enumerate(splits)) // self.size)
