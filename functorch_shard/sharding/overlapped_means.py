"""The mean over replicas, taken while backward goes on: what a gather does with its complete reductions.

Note [Overlapped means]: ``fs.grad`` takes the mean over ranks at its end, Note [Boundary]; with replicas that is an
all-reduce of every shard, and nothing is left to compute meanwhile. If an input is used by one gather and nothing else,
the mean of its gradient is that of this gather's reduction. There the all-reduce starts as soon as the reduction is
complete, and backward computes the gradients of the unit before. Whether an input has other uses is read from the graph
before backward runs; and whether the loss itself communicates over replicas: then all means are taken at the end, as
that backward may come between other means on each replica.

All ranks of all replicas take these in one order, from the last input to the first, whichever gathers and units they
use, and whatever else they compute from the shards: a buffer waits for those after it. What cannot start in backward,
as one after it is missing, is left to the end, and so is all that is before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from threading import RLock
from typing import Any

from torch import Tensor

from ..collectives.rules import Schedule, axis_of
from ..communication.backend import Work
from ..layout.layout import Layout
from ..torch_internals.autograd import hooks_of, nodes, nodes_behind
from .reduction import Put

Place = tuple[str, Layout]  # of a shard: its buffer's key, and its layout
UNDER_WAY = 2  # all-reduces at a time: each holds its operand until it is waited for


class Means:
    """The means of reductions, in an order that is the same on all ranks.

    Args:
        places: of each input that is a shard its buffer's key and its layout.
        taken: the positions of inputs whose means were taken are added to it.
    """

    def __init__(self, places: Sequence[Place | None], taken: set[int]) -> None:
        self._taken, self._lock = taken, RLock()
        self._to_start = [(i, schedule) for i in order_of_means(places) if (schedule := _over_replicas(places[i]))]
        self._reduced: dict[int, Tensor] = {}
        self._started: dict[int, Work] = {}
        self._means: dict[int, Tensor] = {}

    def add(self, i: int, total: Tensor) -> Work:
        """Return the mean of input ``i`` if that is started, which is ``taken`` then, or else ``total``.

        ``total`` is the sum over the ranks that share the input; it is overwritten.
        """
        with self._lock:
            self._reduced[i] = total
            while self._to_start and self._to_start[0][0] in self._reduced:
                self._wait_until(UNDER_WAY - 1)
                following, schedule = self._to_start.pop(0)
                self._started[following] = _mean(self._reduced.pop(following), schedule)
        return Work(lambda: self._result(i))

    def _result(self, i: int) -> Tensor:
        with self._lock:
            if i in self._reduced:
                return self._reduced.pop(i)
            self._wait_until(0)
            self._taken.add(i)
            return self._means.pop(i)

    def _wait_until(self, left: int) -> None:
        """Wait for the first ones, until so many are under way."""
        for i in [*self._started][: max(len(self._started) - left, 0)]:
            self._means[i] = self._started.pop(i).wait()


def _mean(total: Tensor, schedule: Schedule) -> Work:
    work = schedule.copies[0].issue("psum", schedule.to_average(total.to(schedule.carried), Tensor.div_))
    return work.then(lambda total: schedule.mean(total, Tensor.div_).to(schedule.returned))


def order_of_means(places: Sequence[Place | None]) -> list[int]:
    """The inputs that are shards, by position, in the order to take their means in: those that may overlap first."""
    shards = [i for i, place in reversed([*enumerate(places)]) if place is not None]
    return sorted(shards, key=lambda i: not _over_replicas(places[i]))


def overlap_means(
    value: Tensor, anchors: Sequence[Tensor], inputs: Sequence[Tensor], places: Sequence[Place | None], taken: set[int]
) -> None:
    """Have the gathers behind ``anchors`` of a boundary take the means of the gradients that each of them makes alone.

    ``value`` is differentiated by ``inputs``; ``places`` and ``taken`` as in :class:`Means`.
    """
    gathers: list[Any] = [node for x in anchors if hasattr(node := x.grad_fn, "session")]
    averaged = {id(x): i for i, (x, place) in enumerate(zip(inputs, places, strict=True)) if _is_averaged(x, place)}
    if not gathers or not averaged:
        return
    graph = nodes(value.grad_fn, *gathers)
    uses = Counter([id(value), *(_leaf(behind) for node in graph for behind in nodes_behind(node))])
    alone = {leaf: i for leaf, i in averaged.items() if uses[leaf] == 1}
    replicas = {place[1].replicate_axis for place in places if place}
    communicated_over = (name for node in graph if (axis := axis_of(node)) for name in axis.name.split(","))
    if not alone or not replicas.isdisjoint(communicated_over):
        return
    means = Means(places, taken)
    for node in gathers:
        session = node.session
        found = {key: alone.get(_leaf(behind)) for key, behind in zip(node.keys, nodes_behind(node), strict=True)}
        own = {key: i for key, i in found.items() if i is not None and places[i] == (key, session.layout)}
        resident = {key: i for key, i in own.items() if key not in session.offloaded}
        session.reductions.put = partial(_put, means, resident, session.reductions.put)


def _put(means: Means, inputs: Mapping[str, int], put: Put, key: str, total: Tensor) -> Tensor | Work:
    return means.add(inputs[key], total) if key in inputs else put(key, total)


def _over_replicas(place: Place | None) -> Schedule | None:
    """The schedule of a mean that needs replicas, which have a process group of their own; ``None`` for others."""
    schedule = place[1].schedules[place[0], None] if place else None
    return schedule if schedule and schedule.shard_axis and schedule.copies else None


def _is_averaged(x: Tensor, place: Place | None) -> bool:
    """Whether the mean of the gradient of ``x`` may be that of a reduction, which hooks of ``x`` would not see."""
    schedule = _over_replicas(place) if x.is_floating_point() else None
    if schedule is None or hooks_of(x):
        return False
    return schedule.returned == x.dtype or x.grad_dtype is None


def _leaf(node: Any) -> int:
    """The id of the leaf whose gradient ``node`` adds up; that of ``None`` for other nodes."""
    return id(getattr(node, "variable", None))
