"""Ranks inside this process: a collective is arithmetic on the values of all of them.

While they run, ``torch.distributed`` has a default process group of their number, which refuses collectives: a program
that asks ``is_initialized()`` would take itself for the only process. On sequential ranks ``get_rank()`` is the rank;
on batched ones it is 0, since torch's own loggers ask for it.

Writes into what simulated ranks gathered are refused, as lazy parameters of real ranks refuse them: one through
``.data`` or without grad would act until the end of the function and never reach the shards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..errors import reject
from ..torch_internals.autograd import Function, being_traced, outside_transforms, without_batches
from ..torch_internals.tensors import batch_levels
from .backend import Backend, Finished, Work
from .collective import Collective

OUTSIDE = (
    "simulated ranks of axis {!r} only exist inside mesh.spmd: decorate the function that communicates with "
    "@mesh.spmd, or wrap it, mesh.spmd(fn)(*args)."
)


@dataclass(frozen=True, eq=False)
class Index:
    """The number of the rank that runs, on one axis of ``size`` batched ranks."""

    name: str
    size: int

    def get(self) -> Tensor | None:
        """Return the number, batched over all ranks; ``None`` outside of ``spmd``."""
        return RUN.get().indices.get(self)

    def here(self) -> Tensor:
        """Return the number; raise outside of ``spmd``."""
        if (index := self.get()) is None:
            raise RuntimeError(OUTSIDE.format(self.name))
        return index


@dataclass(frozen=True)
class Run:
    """What runs here as simulated ranks.

    Args:
        indices: of batched ranks: their numbers, by axis, outermost first.
        rank: of ranks that run one after the other: which one this is.
        gathered: what they gathered; ``None`` outside of ``spmd``.
    """

    indices: Mapping[Index, Tensor] = field(default_factory=dict)
    rank: int | None = None
    gathered: Gathered | None = None


RUN: ContextVar[Run] = ContextVar("the simulated ranks that run here", default=Run())  # noqa: B039


@contextmanager
def running(indices: Mapping[Index, Tensor] | None = None, **changes: Any) -> Iterator[None]:
    """A context whose :class:`Run` has these ``indices`` besides its own, and other changes."""
    before = RUN.get()
    token = RUN.set(replace(before, indices={**before.indices, **(indices or {})}, **changes))
    try:
        yield
    finally:
        RUN.reset(token)


def axes_over(x: Tensor) -> tuple[str, ...]:
    """Return the axes of the running ranks over which ``x`` varies, outermost first: Note [Varies] in varying.py."""
    levels = batch_levels(x)
    several = [(axis, index) for axis, index in RUN.get().indices.items() if without_batches(index).numel() > 1]
    return tuple(axis.name for axis, index in several if not levels.isdisjoint(batch_levels(index)))


@dataclass(frozen=True)
class StackedBackend(Backend):
    """Batched ranks of one axis, or of several as one, outermost first; collectives come at the innermost level."""

    size: int
    ranks: tuple[Index, ...] = field(repr=False)
    siblings: tuple[Index, ...] = field(repr=False)
    simulated = True

    @property
    def in_rank(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.ranks[0].get() is not None

    def index(self) -> Tensor:
        index = self.ranks[0].here()
        for each in self.ranks[1:]:
            index = index * each.size + each.here()
        return index

    def place(self) -> tuple[Tensor, Tensor | None]:
        others = [index for each in self.siblings if (index := each.get()) is not None]
        return self.ranks[-1].here(), sum(others[1:], others[0]) if others else None

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        if len(x) == self.size:  # of a joint axis too, of what runs below every level
            return Finished(of_all_ranks(op, x, self.size))
        *outer, inner = self.ranks
        for each in reversed(outer):
            x = _Rows.apply(x, each.here())
        made = of_all_ranks(op, x.flatten(0, len(outer)), self.size)
        if op.law.is_scattered:  # each rank of the outer axes takes what is its own
            made = made.unflatten(0, (*(each.size for each in outer), inner.size))
            for each in outer:
                made = made.index_select(0, each.here().reshape(1)).squeeze(0)
        return Finished(made)


class _Rows(Function):
    """The values of all ranks of an axis in dim 0, with which its level of vmap ends for them."""

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        raise AssertionError("no level of the axis around this")

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor) -> Any:
        if in_dims[1] is not None:
            return x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0), None
        rows = _Rows.apply(x if in_dims[0] is None else x.movedim(in_dims[0], -1), index)  # of an axis between
        return rows, None if in_dims[0] is None else rows.ndim - 1


def of_all_ranks(op: Collective, x: Tensor, size: int) -> Tensor:
    """The result of ``op`` for the values ``x`` of all ranks: one value, or a stack of one for each."""
    made = op.law.of_all_ranks(op, x, size)
    if isinstance(made, Tensor):
        return made
    if len({row.shape for row in made}) == 1:
        return torch.stack(made)
    longest = max(row.shape[-1] for row in made)
    return torch.stack([pad(row, (0, longest - row.shape[-1])) for row in made])


# What torch.distributed is inside of simulated ranks.

_GROUP = "simulated"
_ONE_AT_A_TIME = Lock()  # threads of the program may run simulated ranks at once, and share a group


@contextmanager
def default_group(size: int) -> Iterator[None]:
    """A context in which ``torch.distributed`` speaks of ``size`` simulated ranks, unless the process has a group."""
    with _ONE_AT_A_TIME:
        if not dist.is_initialized():
            if _GROUP not in dist.Backend.backend_list:
                make: Any = _Group
                dist.Backend.register_backend(_GROUP, lambda _, rank, size, timeout: make(rank, size), devices=["cpu"])
            hook = sys.excepthook  # init_process_group sets another one
            dist.init_process_group(_GROUP, store=dist.HashStore(), rank=0, world_size=size)
            sys.excepthook = hook
        group = dist.group.WORLD if isinstance(dist.group.WORLD, _Group) else None
        if group is not None:
            group.users += 1
    try:
        yield
    finally:
        with _ONE_AT_A_TIME:
            if group is not None:
                group.users -= 1
                if not group.users:
                    dist.destroy_process_group()


class _Group(dist.ProcessGroup):
    """All simulated ranks. Of collectives torch says "No backend type associated with device type"."""

    users = 0

    def rank(self) -> int:
        return RUN.get().rank or 0


# Writes into what was gathered.

_ADVICE = (
    "What gather returns is a copy: a write into it, through .data or under no_grad, is forgotten; real ranks refuse "
    "it too. Change the shards, p.clamp(...) in a tree_map over the Sharded after the step, or gather with lazy=False "
    "for tensors of your own."
)


class Gathered:
    """What one run of ``spmd`` or ``fs.grad`` gathered, the last of each buffer, with a sum of its bits."""

    def __init__(self, verb: str = "spmd") -> None:
        self._verb = verb
        self._seen: dict[str, tuple[Sequence[Tensor], Tensor, Sequence[str]]] = {}

    def add(self, key: str, parts: Mapping[str, Tensor]) -> None:
        """Remember the parameters of a buffer, and look at those of this key that were gathered before."""
        self.check([key] if key in self._seen else [])
        plain = [*map(without_batches, parts.values())]
        x = plain[0]
        if type(x) is Tensor and not x.is_meta and not being_traced() and not torch.compiler.is_compiling():
            self._seen[key] = plain, bit_sum(plain), [*parts]

    def check(self, keys: Sequence[str] | None = None) -> None:
        """Raise if parameters of one of these buffers, or of all, were written to."""
        keys = [*self._seen] if keys is None else keys
        found = [self._seen.pop(key) for key in keys]
        if found:
            changed = torch.stack([bit_sum(parts).cpu() != before.cpu() for parts, before, _ in found]).tolist()
            rows = zip(keys, found, changed, strict=True)
            named = [f"buffer {key!r} ({', '.join(names)})" for key, (_, _, names), wrong in rows if wrong]
            if problems := [f"{name}: written to inside of the function" for name in named]:
                reject(self._verb, problems, _ADVICE, RuntimeError)


@contextmanager
def writes_refused() -> Iterator[None]:
    """A run of ``spmd`` on simulated ranks: raise at its end if something that it gathered was written to."""
    gathered = Gathered()
    with running(gathered=gathered):
        yield
    gathered.check()


def watch(key: str, parts: Mapping[str, Tensor]) -> None:
    """Have writes into the parameters of a buffer refused at the end of ``spmd``; real ranks refuse them at once."""
    if gathered := RUN.get().gathered:
        gathered.add(key, parts)


def bit_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the words of 8 bytes of plain tensors, the last one filled up with zeros, modulo 2 ** 64."""
    with outside_transforms(), torch.no_grad():
        first, *others = [*map(Tensor.flatten, parts)]
        plain = (torch.cat([first, *others]) if others else first).resolve_conj().resolve_neg()
        data = plain.contiguous().view(torch.uint8)  # (bytes,)
        if data.storage_offset() % 8:  # int64 is aligned to 8 bytes
            data = data.clone()
        rest = data.numel() % 8
        total = data[: data.numel() - rest].view(torch.int64).sum()
        return total + pad(data[-rest:], (0, 8 - rest)).view(torch.int64).sum() if rest else total
