"""Several axes of batched simulated ranks as one: ranks of ``mesh["dp", "cp"]`` count in row-major order.

They have one level of vmap for each axis of the mesh: a collective comes here at the innermost level of its axes, and
goes on to the others with the rows that it has so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor

from ..torch_internals.autograd import Function
from .backend import Backend, Finished, Work
from .collective import Collective
from .simulated import Index, StackedBackend, sum_of


@dataclass(frozen=True)
class JointStackedBackend(Backend):
    """Simulated ranks of several axes, ``parts``, outermost first."""

    parts: tuple[StackedBackend, ...]
    siblings: tuple[Index, ...] = field(repr=False)
    simulated: bool = field(default=True, init=False)

    def index(self) -> Tensor:
        index = self.parts[0].index()
        for part in self.parts[1:]:
            index = index * part.size + part.index()
        return index

    def place(self) -> tuple[Tensor, Tensor | None]:
        return self.parts[-1].index(), sum_of(self.siblings)

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        if len(x) == self._flat.size:  # all rows: of what runs below every level
            return self._flat.issue(op, x)
        return Finished(_Outwards.apply(x, self.parts[-2].index(), self, op, 2))

    @property
    def _flat(self) -> StackedBackend:
        return replace(self.parts[0], size=prod(part.size for part in self.parts))

    def result(self, op: Collective, x: Tensor) -> Tensor:
        """What the ranks get, from the operands of all; one row each, unless it is one value."""
        sizes = tuple(part.size for part in self.parts)
        made = self._flat.issue(op, x.flatten(0, len(sizes) - 1)).wait()
        return made.unflatten(0, sizes) if op.law.is_scattered else made


class _Outwards(Function):
    """At the level of the ``depth``-th axis from the inside: add its rows, and go on to the next one."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, backend: JointStackedBackend, op: Collective, depth: int) -> Tensor:
        raise AssertionError(f"no level of axis {op.axis!r} around this")

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, index: Tensor, backend: JointStackedBackend, op: Collective, depth: int
    ) -> Any:
        kept = not op.law.is_scattered  # one value for all ranks
        if in_dims[1] is None:  # the level of an axis between: its values go behind the rows
            if in_dims[0] is None:
                return _Outwards.apply(x, index, backend, op, depth), None
            x = x.movedim(in_dims[0], depth - 1)
            made = _Outwards.apply(x, index, backend, replace(op, dim=op.dim + 1), depth)
            return made, 0 if kept else depth - 1
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        if depth == len(backend.parts):
            return backend.result(op, x), None if kept else 0
        made = _Outwards.apply(x, backend.parts[-depth - 1].index(), backend, op, depth + 1)
        return made, None if kept else 0
