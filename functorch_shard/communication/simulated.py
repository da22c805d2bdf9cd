"""Ranks inside this process: a collective is arithmetic on the values of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..torch_internals.autograd import without_batches
from ..torch_internals.tensors import batch_levels
from .backend import Backend, Finished, Work
from .collective import Collective

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


def axes_over(x: Tensor) -> tuple[str, ...]:
    """Return the axes of the running ranks over which ``x`` varies, outermost first: Note [Varies] in varying.py."""
    levels = batch_levels(x)
    several = [(axis, index) for axis, index in running_ranks().items() if without_batches(index).numel() > 1]
    return tuple(axis.name for axis, index in several if not levels.isdisjoint(batch_levels(index)))


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
    """The result of ``op`` for the values ``x`` of all ranks: one value, or a stack of one for each."""
    made = op.law.of_all_ranks(op, x, size)
    if isinstance(made, Tensor):
        return made
    if len({row.shape for row in made}) == 1:
        return torch.stack(made)
    longest = max(row.shape[-1] for row in made)
    return torch.stack([pad(row, (0, longest - row.shape[-1])) for row in made])
