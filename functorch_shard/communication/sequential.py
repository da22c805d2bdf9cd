"""Ranks inside this process that run one after the other: a collective is where they wait for each other.

Each rank is a thread, Note [Own state] in torch_internals/taking_turns.py, with a rank number and tensors of its own,
as a process has. The last rank that comes to a collective computes the results of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..torch_internals.autograd import backward_pass
from ..torch_internals.frames import callers
from .backend import Backend
from .collective import Collective, describe
from .process_group import in_memory
from .simulated import of_all_ranks, sum_in_rank_order
from .turns import ADVICE, Turns
from .work import Finished, Work
from .writes import Gathered


@dataclass(frozen=True)
class Here:
    """The rank that this thread runs."""

    rank: int
    coordinates: Mapping[str, int]  # by axis
    ranks: SequentialRanks
    gathered: Gathered


Running = ContextVar["Here | None"]


@dataclass(frozen=True)
class SequentialBackend(Backend):
    """An axis of simulated ranks that run one after the other; a joint one has the names of its axes: ``"dp,cp"``."""

    axis: str
    size: int
    running: Running = field(repr=False)  # of all axes

    @property
    def simulated(self) -> bool:
        """Outside of ``spmd`` values are those of all ranks, inside of it this rank's."""
        return self.running.get() is None

    @property
    def in_rank(self) -> bool:
        return self.running.get() is not None

    @property
    def is_counted(self) -> bool:
        here = self.running.get()
        return here is None or here.rank == 0

    def index(self) -> int:
        here = self._here()
        return here.ranks.members_of(here, self.axis).index(here.rank)

    def ready(self) -> None:
        self._here()

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        if self.running.get() is None and backward_pass() is None:  # of values of all ranks, outside of spmd
            return Finished(of_all_ranks(op, x, self.size))
        here = self._here()
        return here.ranks.issue(here, self.axis, op, x)

    def _here(self) -> Here:
        here = self.running.get()
        if here is None:
            raise RuntimeError(
                f"simulated ranks of axis {self.axis!r} only exist inside mesh.spmd: decorate the function that "
                "communicates with @mesh.spmd, or wrap it, mesh.spmd(fn)(*args). What simulated ranks that run one "
                "after the other computed is differentiated inside too: other threads than theirs are not ranks."
            )
        return here


@dataclass(frozen=True)
class _Posted:
    """What one rank passed to a collective."""

    op: Collective
    x: Tensor
    where: str

    @property
    def text(self) -> str:
        """The same on all ranks, or the collectives are different ones."""
        per_rank = self.op.kind in ("scatter", "broadcast", "ragged_all_to_all")
        return describe(self.op) + ("" if per_rank else f" of shape {tuple(self.x.shape)}")

    @property
    def key(self) -> tuple[object, ...]:
        return self.text, self.op.dim, self.op.source, self.op.splits

    def __str__(self) -> str:
        return f"{self.text} ({self.where})"


class _Meeting:
    """One collective of some ranks."""

    def __init__(self, members: Sequence[int], axis: str) -> None:
        self._members, self._axis = members, axis
        self.posted: dict[int, _Posted] = {}
        self._results: dict[int, Tensor] = {}

    @property
    def is_ready(self) -> bool:
        return len(self.posted) == len(self._members)

    def of(self, rank: int) -> _Awaited:
        return _Awaited(self, rank)

    def post(self, rank: int, posted: _Posted) -> None:
        self.posted[rank] = posted
        if self.is_ready:
            xs = {member: self.posted[member].x for member in self._members}
            results = _results(self.posted[rank].op, [*xs.values()], [xs[member] for member in sorted(xs)])
            self._results = dict(zip(self._members, results, strict=True))

    def result_of(self, rank: int) -> Tensor:
        return self._results.pop(rank)

    def missing(self) -> Sequence[int]:
        return [rank for rank in self._members if rank not in self.posted]


@dataclass(frozen=True)
class _Awaited:
    meeting: _Meeting
    rank: int

    @property
    def is_ready(self) -> bool:
        return self.meeting.is_ready

    def __str__(self) -> str:
        absent = self.meeting.missing()
        who = ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent))
        return f"{who} in its {self.meeting.posted[self.rank]}"


class SequentialRanks:
    """The collectives of one run of ``spmd``.

    Args:
        turns: of the threads of all ranks.
        coordinates: of each rank, by axis.
    """

    def __init__(self, turns: Turns, coordinates: Sequence[Mapping[str, int]]) -> None:
        self._turns, self._coordinates = turns, coordinates
        self._members: dict[tuple[str, int], Sequence[int]] = {}
        self._issued: dict[tuple[str, int], int] = {}  # how many, by axis and rank
        self._open: dict[tuple[str, Sequence[int], int], _Meeting] = {}

    def issue(self, here: Here, axis: str, op: Collective, x: Tensor) -> Work:
        """Of the k-th collective of each rank over an axis, make one."""
        if self._turns.failure:
            raise RuntimeError(f"{self._turns.failure}\nRank {here.rank} cannot issue {op} any more.")
        members, number = self.members_of(here, axis), self._issued.get((axis, here.rank), 0)
        self._issued[axis, here.rank] = number + 1
        meeting = self._open.setdefault((axis, members, number), _Meeting(members, axis))
        posted = _Posted(op, in_memory(x, x.dtype) if op.kind != "broadcast" else x, _caller())
        self._refuse_difference(meeting, here.rank, posted, axis, number)
        meeting.post(here.rank, posted)
        if meeting.is_ready:
            del self._open[axis, members, number]

        def finish() -> Tensor:
            self._turns.wait(here.rank, meeting.of(here.rank))
            return meeting.result_of(here.rank)

        return Work(finish)

    def members_of(self, here: Here, axis: str) -> Sequence[int]:
        """The ranks that differ from this one in their place on the axis alone, in the order of those places."""
        if (axis, here.rank) not in self._members:
            names = axis.split(",")
            others = {name: at for name, at in here.coordinates.items() if name not in names}
            alike = [rank for rank, each in enumerate(self._coordinates) if others.items() <= each.items()]
            members = tuple(sorted(alike, key=lambda rank: [self._coordinates[rank][name] for name in names]))
            self._members.update(((axis, rank), members) for rank in members)
        return self._members[axis, here.rank]

    def _refuse_difference(self, meeting: _Meeting, rank: int, posted: _Posted, axis: str, number: int) -> None:
        if all(each.key == posted.key for each in meeting.posted.values()):
            return
        lines = [f"  rank {other}: {each}" for other, each in meeting.posted.items()] + [f"  rank {rank}: {posted}"]
        title = f"simulated ranks issue different collectives, each as its number {number + 1} over {axis!r}:"
        self._turns.failure = "\n".join([title, *lines, ADVICE])
        raise RuntimeError(self._turns.failure)


def _caller() -> str:
    """The line of the program that communicates."""
    library = ("functorch_shard", "torch", "optree", "contextlib", "functools")
    for frame in callers():
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in library:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
    return "unknown line"


def _results(op: Collective, xs: Sequence[Tensor], summed: Sequence[Tensor]) -> Sequence[Tensor]:
    """What each rank gets, in new memory; ``op.kind`` is that of Note [Issue].

    ``xs`` are in the order of the axis, and ``summed`` are the same in that of the mesh: they differ on a joint axis.
    """
    size, device = len(xs), op.device or xs[0].device
    match op.kind:
        case "all_gather" | "exchange":
            whole = torch.cat([x.to(device, op.dtype) for x in xs], op.dim)
            return _copies(whole, size)
        case "psum_scatter":
            total = sum_in_rank_order(summed)
            return [part.clone().to(device) for part in total.chunk(size, op.dim)]
        case "psum":
            return _copies(sum_in_rank_order(summed).to(device), size)
        case "pmax":
            return _copies(torch.stack([*xs]).amax(0).to(device), size)
        case "all_to_all":
            return [torch.stack([x.select(op.dim, to) for x in xs], op.dim).to(device) for to in range(size)]
        case "ragged_all_to_all":
            parts = [x.split(sizes, -1) for x, sizes in zip(xs, op.splits, strict=True)]
            return [torch.cat([part[to] for part in parts], -1).to(device) for to in range(size)]
        case "scatter":
            return [row.to(device, op.dtype).clone() for row in xs[op.source].unbind(0)]
        case "broadcast":
            source = xs[op.source].detach().clone()
            return [x if rank == op.source else x.copy_(source) for rank, x in enumerate(xs)]
    raise NotImplementedError(f"simulated ranks have no collective {op.kind!r}")


def _copies(x: Tensor, number: int) -> Sequence[Tensor]:
    return [x, *(x.clone() for _ in range(number - 1))]
