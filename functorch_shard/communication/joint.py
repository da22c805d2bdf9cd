"""Several axes as one: ranks of ``mesh["dp", "cp"]`` count in row-major order of these names.

Real ranks have a process group of their own for it. Simulated ranks have one level of vmap for each axis of the mesh: a
collective comes here at the innermost level of its axes, and goes on to the others with the rows that it has so far.
Sums are added up in the mesh's order on both, whatever the order of the names is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..torch_internals.autograd import Function
from .backend import Backend
from .collective import Collective
from .simulated import Index, StackedBackend
from .work import Finished, Work

_ONE_VALUE = ("all_gather", "exchange", "psum", "pmax", "broadcast")  # for all ranks


def joint_order(names: Sequence[str], sizes: dict[str, int]) -> tuple[int, ...]:
    """The place of each joint rank among the same ranks in the order of ``sizes``, the mesh's."""
    inside = [name for name in sizes if name in names]
    found = []
    for at in product(*(range(sizes[name]) for name in names)):
        coordinate, place = dict(zip(names, at, strict=True)), 0
        for name in inside:
            place = place * sizes[name] + coordinate[name]
        found.append(place)
    return tuple(found)


def joint_of_stacked(backends: dict[str, StackedBackend], names: Sequence[str]) -> Backend:
    """Return the backend of simulated ranks of the axes ``names``; ``backends`` are in the mesh's order."""
    names = [name for name in names if backends[name].size > 1] or [*names]
    if len(names) == 1:
        return backends[names[0]]
    inside = [name for name in backends if name in names]
    others = tuple(backend.ranks for name, backend in backends.items() if name not in names)
    order = joint_order(names, {name: backends[name].size for name in inside})
    parts, named = (tuple(backends[name] for name in some) for some in (inside, names))
    return JointStackedBackend(parts, named, order, others)


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


@dataclass(frozen=True)
class JointStackedBackend(Backend):
    """Simulated ranks of several axes; ``parts`` are these in the mesh's order, ``named`` in that of the names."""

    parts: tuple[StackedBackend, ...]
    named: tuple[StackedBackend, ...]
    order: tuple[int, ...]
    siblings: tuple[Index, ...] = field(repr=False)
    simulated: bool = field(default=True, init=False)

    def index(self) -> Tensor:
        index = self.named[0].index()
        for part in self.named[1:]:
            index = index * part.size + part.index()
        return index

    def level(self) -> Tensor:
        return self.parts[-1].index()

    def rows(self, size: int) -> int:
        return self.parts[-1].size

    def others(self) -> Tensor | None:
        indices = [index for index in (ranks.get() for ranks in self.siblings) if index is not None]
        return sum(indices[1:], indices[0]) if indices else None

    def ready(self) -> None:
        self.level()

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        if len(x) == len(self.order):  # all rows, in joint order: of what runs below every level
            return self._flat.issue(op, x)
        return Finished(_Outwards.apply(x, self.parts[-2].index(), self, op, 2))

    @property
    def _flat(self) -> StackedBackend:
        return replace(self.parts[0], size=len(self.order))

    def result(self, op: Collective, x: Tensor) -> Tensor:
        """What the ranks get, from the operands of all; one row each, in the mesh's order, unless it is one value."""
        sizes = tuple(part.size for part in self.parts)
        rows = x.flatten(0, len(sizes) - 1)
        if op.kind not in ("psum", "pmax", "psum_scatter"):
            rows = rows[list(self.order)]
        made = self._flat.issue(op, rows).wait()
        return made if op.kind in _ONE_VALUE else made[list(inverse(self.order))].unflatten(0, sizes)


class _Outwards(Function):
    """At the level of the ``depth``-th axis from the inside: add its rows, and go on to the next one."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, backend: JointStackedBackend, op: Collective, depth: int) -> Tensor:
        raise AssertionError(f"no level of axis {op.axis!r} around this")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, index: Tensor, backend: JointStackedBackend, op: Collective, depth: int
    ) -> Any:
        kept = op.kind in _ONE_VALUE
        if in_dims[1] is None:  # the level of an axis between: its values go behind the rows
            if in_dims[0] is None:
                return _Outwards.apply(x, index, backend, op, depth), None
            if op.kind == "scatter":  # whose operand has a row for each rank there
                return _Outwards.apply(x.movedim(in_dims[0], -1), index, backend, op, depth), -1
            x = x.movedim(in_dims[0], depth - 1)
            made = _Outwards.apply(x, index, backend, replace(op, dim=op.dim + 1), depth)
            return made, 0 if kept else depth - 1
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        if depth == len(backend.parts):
            return backend.result(op, x), None if kept else 0
        made = _Outwards.apply(x, backend.parts[-depth - 1].index(), backend, op, depth + 1)
        return made, None if kept else 0


@dataclass(frozen=True)
class ReorderedBackend(Backend):
    """Real ranks that count in another order than their process group: joint rank j is rank ``order[j]`` there."""

    inner: Backend
    order: tuple[int, ...]

    def index(self) -> int:
        return inverse(self.order)[int(self.inner.index())]

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        order, back = self.order, inverse(self.order)
        match op.kind:
            case "all_gather" | "exchange":
                return self.inner.issue(op, x).then(lambda rows: _permuted(rows, op.dim, order))
            case "psum_scatter":
                return self.inner.issue(op, _permuted(x, op.dim, back))
            case "all_to_all":
                work = self.inner.issue(op, _permuted(x, op.dim, back))
                return work.then(lambda rows: _permuted(rows, op.dim, order))
            case "ragged_all_to_all":
                return self._ragged(op, x)
            case "scatter":
                x = x[list(back)] if len(x) else x
        return self.inner.issue(replace(op, source=order[op.source]), x)

    def _ragged(self, op: Collective, x: Tensor) -> Work:
        me, order, back = self.index(), self.order, inverse(self.order)
        splits = tuple(tuple(op.splits[i][j] for j in back) for i in back)
        parts = x.split([*op.splits[me], x.shape[-1] - sum(op.splits[me])], -1)
        work = self.inner.issue(replace(op, splits=splits), torch.cat([parts[j] for j in back], -1))
        sizes = [op.splits[i][me] for i in back]
        return work.then(lambda got: torch.cat([got.split(sizes, -1)[i] for i in order], -1))


def _permuted(x: Tensor, dim: int, order: Sequence[int]) -> Tensor:
    """Equal blocks of ``dim`` in another order."""
    blocks = x.unflatten(dim, (len(order), x.shape[dim] // len(order)))
    return blocks.index_select(dim, torch.tensor(order, device=x.device)).flatten(dim, dim + 1)
