"""Threads that take turns: one runs at a time, until it ends or waits for a collective.

Then the first rank that can continue does, so the order of turns depends on the program only. The last rank that comes
to a collective computes the results of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from threading import Event, Lock, Thread, get_ident

import torch
from torch import Tensor

from ..communication.backend import Work
from ..communication.collective import Collective, describe
from ..communication.process_group import in_memory
from ..communication.simulated import RANK_OF_THREAD, of_all_ranks
from ..communication.writes import Gathered

_ADVICE = (
    "All ranks must issue the same collectives in the same order: look for a branch, a loop or an early return that "
    "depends on the rank or its data."
)


@dataclass
class _Meeting:
    """One collective: what each of its ranks passed, and the results that were not waited for yet."""

    members: Sequence[int]
    op: Collective
    name: str
    given: dict[int, Tensor] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return len(self.given) == len(self.members)

    def post(self, rank: int, x: Tensor) -> None:
        self.given[rank] = x
        if self.is_ready:
            xs = [self.given[member] for member in self.members]
            results = _results(self.op, xs, [self.given[member] for member in sorted(self.members)])
            self.results = dict(zip(self.members, results, strict=True))

    def __str__(self) -> str:
        absent = [str(rank) for rank in self.members if rank not in self.given]
        return f"rank{'s' * (len(absent) > 1)} {', '.join(absent)} in its {self.name}"


class Run:
    """One run of a function as every rank.

    Args:
        coordinates: of each rank, by axis.
        begin: called when a turn of a rank begins.
        end: called before a rank waits; may raise instead.
    """

    def __init__(
        self, coordinates: Sequence[Mapping[str, int]], begin: Callable[[int], None], end: Callable[[int], None]
    ) -> None:
        self.coordinates, self.rank, self._begin, self._end = coordinates, 0, begin, end
        self.gathered = [Gathered() for _ in coordinates]
        self._locks = [Lock() for _ in coordinates]  # a thread whose turn it is not waits to acquire its lock
        self._threads: dict[int, int] = {}
        self._waiting: dict[int, _Meeting] = {}  # in the order in which they began to
        self._ended: set[int] = set()
        self._errors: list[tuple[int, BaseException]] = []
        self._all_ended = Event()
        self._failure = ""  # why no rank can communicate any more
        self._issued: dict[tuple[str, int], int] = {}  # how many, by axis and rank
        self._open: dict[tuple[str, Sequence[int], int], _Meeting] = {}

    def all_ranks(self, body: Callable[[int], None]) -> None:
        """Run ``body`` as each rank to its end; raise the first error of any."""
        ranks = range(len(self._locks))
        threads = [
            Thread(target=copy_context().run, args=(self._one, r, body), name=f"simulated rank {r}", daemon=True)
            for r in ranks
        ]
        for lock, thread in zip(self._locks, threads, strict=True):
            lock.acquire()
            thread.start()
        self._pass_to(0)
        try:
            self._all_ended.wait()
        except BaseException as error:  # an interrupt; the threads end at their next collective
            self._failure = self._failure or f"interrupted by {type(error).__name__}"
            self._all_ended.wait()
            raise
        for thread in threads:
            thread.join()
        if self._errors:
            rank, error = self._errors[0]
            add_note = getattr(error, "add_note", lambda _: None)  # Python 3.10 has none
            add_note(f"raised by rank {rank} of {len(ranks)} simulated ones")
            try:
                raise error
            finally:
                self._errors.clear()
                del error  # it refers to this frame

    def issue(self, axis: str, op: Collective, x: Tensor) -> Work:
        """Start the next collective of the running rank over an axis: the k-th ones of all ranks are one."""
        rank, members = self.rank, self.members(axis)
        if self._failure:
            raise RuntimeError(f"{self._failure}\nRank {rank} cannot issue {op} any more.")
        number = self._issued[axis, rank] = self._issued.get((axis, rank), 0) + 1
        per_rank = op.kind in ("scatter", "broadcast", "ragged_all_to_all")
        name = describe(op) + ("" if per_rank else f" of shape {tuple(x.shape)}")
        meeting = self._open.setdefault((axis, members, number), _Meeting(members, op, name))
        if name != meeting.name:
            others = ", ".join(map(str, meeting.given))
            self._failure = (
                f"simulated ranks issue different collectives, each as its number {number} over {axis!r}:\n"
                f"  rank {others}: {meeting.name}\n  rank {rank}: {name}\n{_ADVICE}"
            )
            raise RuntimeError(self._failure)
        meeting.post(rank, in_memory(x, x.dtype) if op.kind != "broadcast" else x)
        if meeting.is_ready:
            del self._open[axis, members, number]
        return Work(lambda: self._wait(rank, meeting))

    def members(self, axis: str) -> Sequence[int]:
        """The ranks that differ from the running one in their place on the axis only, in the order of those places."""
        names, here = axis.split(","), self.coordinates[self.rank]
        others = {name: at for name, at in here.items() if name not in names}
        alike = [rank for rank, each in enumerate(self.coordinates) if others.items() <= each.items()]
        return tuple(sorted(alike, key=lambda rank: [self.coordinates[rank][name] for name in names]))

    def _one(self, rank: int, body: Callable[[int], None]) -> None:
        self._locks[rank].acquire()
        self._threads[rank] = get_ident()
        RANK_OF_THREAD.set(rank)
        try:
            if not self._failure:
                self._begin(rank)
                body(rank)
        except BaseException as error:
            self._errors.append((rank, error))
            self._failure = self._failure or f"rank {rank} raised {type(error).__name__}: {error}"
        self._ended.add(rank)
        self._pass_to(self._next())

    def _wait(self, rank: int, meeting: _Meeting) -> Tensor:
        """Return when ``meeting`` is ready; others have their turns before."""
        if self._threads[rank] != get_ident():
            raise RuntimeError(
                f"rank {rank} waits for a collective in a thread of autograd or of its own, where no other simulated "
                "rank can have its turn. Communicate in the thread of the rank; in backward on a device, under "
                "torch.autograd.set_multithreading_enabled(False)."
            )
        self._waiting[rank] = meeting
        try:
            if (following := self._next()) != rank:
                self._end(rank)
                self._pass_to(following)
                self._locks[rank].acquire()
                self._begin(rank)
        finally:
            del self._waiting[rank]
        if self._failure:
            raise RuntimeError(f"{self._failure}\nRank {rank} waits for {meeting}.")
        return meeting.results.pop(rank)

    def _pass_to(self, rank: int | None) -> None:
        if rank is None:
            self._all_ended.set()
        else:
            self.rank = rank
            self._locks[rank].release()

    def _next(self) -> int | None:
        """The first rank that can continue; after a failure the last that began to wait, so that contexts end in the
        inverse order of their beginnings."""
        left = [rank for rank in range(len(self._locks)) if rank not in self._ended]
        able = [rank for rank in left if rank not in self._waiting or self._waiting[rank].is_ready]
        if left and not able and not self._failure:
            lines = [f"  rank {rank} waits for {self._waiting[rank]}" for rank in sorted(self._waiting)]
            lines += [f"  rank {rank} returned" for rank in sorted(self._ended)]
            title = "simulated ranks wait for each other, and none can go on:"
            self._failure = "\n".join([title, *lines, _ADVICE])
        return ([*self._waiting] or left)[-1] if left and self._failure else min(able, default=None)


def _results(op: Collective, xs: Sequence[Tensor], in_order: Sequence[Tensor]) -> Sequence[Tensor]:
    """What each rank gets, in new memory; ``op.kind`` is that of Note [Issue].

    ``xs`` are in the order of the axis, ``in_order`` the same in that of the mesh: they differ on a joint axis.
    """
    device, size = op.device or xs[0].device, len(xs)
    if op.kind == "broadcast":
        source = xs[op.source].detach().clone()
        return [x if place == op.source else x.copy_(source) for place, x in enumerate(xs)]
    if op.kind == "scatter":
        return [row.clone() for row in xs[op.source].to(device, op.dtype).unbind(0)]
    if op.kind == "ragged_all_to_all":
        parts = [x.split(sizes, -1) for x, sizes in zip(xs, op.splits, strict=True)]
        return [torch.cat([part[to] for part in parts], -1).to(device) for to in range(size)]
    whole = of_all_ranks(op, torch.stack([*(in_order if op.kind.startswith("psum") else xs)]), size)
    each = whole.unbind(0) if op.kind in ("psum_scatter", "all_to_all") else [whole] * size
    return [x.to(device, copy=True, memory_format=torch.contiguous_format) for x in each]
