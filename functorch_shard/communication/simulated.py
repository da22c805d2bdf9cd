"""Ranks inside this process: a collective is arithmetic on the values of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backend import Backend, Finished, Work
from .collective import Collective, Splits

Index = ContextVar["Tensor | None"]  # of one axis: the number of the rank that runs, batched over all of them

_RUNNING: ContextVar[tuple[Index, ...]] = ContextVar("axes whose ranks run", default=())
RANK_OF_THREAD: ContextVar[int | None] = ContextVar("the simulated rank of this thread", default=None)


def rank_of_thread() -> int | None:
    """Return which of the ranks that run one after the other this thread is; ``None`` outside of all."""
    return RANK_OF_THREAD.get()


def running_ranks() -> dict[Index, Tensor]:
    """The indices of the ranks that run here, by axis; empty outside of ``spmd``."""
    indices = {axis: axis.get() for axis in _RUNNING.get()}
    return {axis: index for axis, index in indices.items() if index is not None}


@contextmanager
def as_ranks(indices: Mapping[Index, Tensor]) -> Iterator[None]:
    """A context that runs as the ranks with these indices."""
    tokens = [(axis, axis.set(index)) for axis, index in indices.items()]
    others = tuple(axis for axis in _RUNNING.get() if axis not in indices)
    running = _RUNNING.set((*others, *indices))
    try:
        yield
    finally:
        _RUNNING.reset(running)
        for axis, token in tokens:
            axis.reset(token)


@dataclass(frozen=True)
class StackedBackend(Backend):
    """Simulated ranks: values of all ranks in dim 0, as the vmap rules of ``collectives`` see them."""

    size: int
    ranks: Index = field(repr=False)
    siblings: tuple[Index, ...] = field(default=(), repr=False)
    simulated: bool = field(default=True, init=False)

    @property
    def in_rank(self) -> bool:
        return self.ranks.get() is not None

    def index(self) -> Tensor:
        index = self.ranks.get()
        if index is None:
            raise RuntimeError(
                f"simulated ranks of axis {self.ranks.name!r} only exist inside mesh.spmd: decorate the function that "
                "communicates with @mesh.spmd, or wrap it, mesh.spmd(fn)(*args)."
            )
        return index

    def others(self) -> Tensor | None:
        indices = [index for index in (ranks.get() for ranks in self.siblings) if index is not None]
        return sum(indices[1:], indices[0]) if indices else None

    def ready(self) -> None:
        self.index()

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        return Finished(of_all_ranks(op, x, self.size))


def of_all_ranks(op: Collective, x: Tensor, size: int) -> Tensor:
    """The result of ``op`` for the values ``x`` of all ranks; its dims are those of one rank's value, one less."""
    match op.kind:
        case "all_gather" | "exchange":
            # a copy, as on real ranks: a view would let the result write to the operand
            x = x if _has_dtype_and_device(x, op) else x.to(op.device or x.device, op.dtype)
            return _side_by_side(x, op.dim)
        case "psum_scatter":
            total = sum_in_rank_order(x.unbind(0))
            return total.unflatten(op.dim, (size, total.shape[op.dim] // size)).movedim(op.dim, 0)
        case "psum":
            return sum_in_rank_order(x.unbind(0))
        case "pmax":
            return x.amax(0)
        case "all_to_all":
            return x.movedim(op.dim + 1, 0).movedim(1, op.dim + 1)  # (from, .., to, ..) -> (to, .., from, ..)
        case "ragged_all_to_all":
            return _swapped(x, op.splits)
    raise NotImplementedError(f"simulated ranks have no collective {op.kind!r}")


def _has_dtype_and_device(x: Tensor, op: Collective) -> bool:
    return x.dtype == op.dtype and op.device in (None, x.device)


def _side_by_side(x: Tensor, dim: int) -> Tensor:
    """``torch.cat(x.unbind(0), dim)``, in fewer operators."""
    dim = dim % (x.ndim - 1)
    return x.movedim(0, dim).clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)


def _swapped(x: Tensor, splits: Splits) -> Tensor:
    """Row j: what each rank has for rank j, padded with zeros to the longest row."""
    parts = [
        row.split([*sizes, row.shape[-1] - sum(sizes)], -1) for row, sizes in zip(x.unbind(0), splits, strict=True)
    ]
    rows = [torch.cat([part[j] for part in parts], -1) for j in range(len(splits))]
    longest = max(row.shape[-1] for row in rows)
    return torch.stack([pad(row, (0, longest - row.shape[-1])) for row in rows])


def sum_in_rank_order(rows: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """The sum from the first to the last, rounded after each addend; ``into`` may be one of the first two."""
    if len(rows) == 1:
        return rows[0].clone()
    total = torch.add(rows[0], rows[1]) if into is None else torch.add(rows[0], rows[1], out=into)
    for row in rows[2:]:
        total = total + row if into is None else total.add_(row)  # a zero tangent is not to be written to
    return total
