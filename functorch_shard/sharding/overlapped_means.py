"""The mean over replicas, taken while backward goes on.

Note [Overlapped means]: ``fs.grad`` takes the mean over ranks at its end, Note [Boundary]; with replicas that is an
all-reduce of every shard, and nothing is left to compute meanwhile. Where the gradient by an input is what one gather
reduces, and nothing else, its mean is that of the reduction. There the all-reduce starts as soon as the reduction is
complete, and backward computes the gradients of the unit before. Whether an input has other uses is read from the graph
before backward runs.

All ranks of all replicas start these in one order, from the layout's last buffer to its first, whichever units they
use: a buffer waits for those after it, and one that no gradient came for counts as zeros at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..collectives.data_parallel import no_communication, run
from ..communication.work import Finished, Work
from ..layout.layout import Layout
from ..layout.schedule import AllReduce, Cast, Ops, up_to_communication
from ..mesh.mesh import Mesh
from ..torch_internals.autograd import nodes, nodes_behind

Place = tuple[str, Layout]  # of a shard: its buffer's key, and its layout
UNDER_WAY = 2  # all-reduces at a time: each holds its operand until it is waited for


class Means:
    """The means of some reductions over one gather, in an order that is the same on all ranks.

    Args:
        inputs: of each buffer the position of the input that its gradient is by, in the order to start them in.
        start: starts the mean of a buffer, of the sum over the ranks that share it; ``None`` counts as zeros.
    """

    def __init__(self, inputs: Mapping[str, int], start: Callable[[str, Tensor | None], Work]) -> None:
        self.inputs, self._start = inputs, start
        self._to_start = [*inputs]
        self._reduced: dict[str, Tensor] = {}
        self._started: dict[str, Work] = {}
        self._means: dict[str, Tensor] = {}

    def add(self, key: str, total: Tensor) -> None:
        """``total`` is the sum over the ranks that share buffer ``key``; it is written over."""
        self._reduced[key] = total
        while self._to_start and self._to_start[0] in self._reduced:
            self._start_next()

    def wait(self, key: str) -> Tensor:
        """The mean of buffer ``key``, once; nothing is added after the first call."""
        while self._to_start:
            self._start_next()
        self._wait_until(0)
        return self._means.pop(key)

    def _start_next(self) -> None:
        self._wait_until(UNDER_WAY - 1)
        key = self._to_start.pop(0)
        self._started[key] = self._start(key, self._reduced.pop(key, None))

    def _wait_until(self, left: int) -> None:
        """Wait for the first ones, until so many are under way."""
        for key in [*self._started][: max(len(self._started) - left, 0)]:
            self._means[key] = self._started.pop(key).wait()


def no_means() -> Means:
    """Of no buffer."""
    return Means({}, lambda key, _: Finished(torch.empty(0)))


def start_mean(layout: Layout, device: torch.device, key: str, total: Tensor | None) -> Work:
    """The mean over all ranks of ``total``, the sum over those that share buffer ``key``; it is written over."""
    buffer = layout.buffers[key]
    plan = layout.schedule(buffer)
    ops = (Cast(plan.dtypes.carried), *plan.across, Cast(plan.dtypes.returned))
    x = torch.zeros(buffer.shard_numel, dtype=buffer.dtype, device=device) if total is None else total
    return start_all_reduces(ops, x, key, layout.mesh)


def start_all_reduces(ops: Ops, x: Tensor, key: str, mesh: Mesh) -> Work:
    """What ``ops`` make of ``x``, which is written over: the first all-reduce now, what comes after it on wait."""

    def start(op: AllReduce, x: Tensor) -> Work:
        return mesh[op.axis].issue("psum", x, key=key)

    front, op, behind = up_to_communication(ops)
    assert isinstance(op, AllReduce), op
    work = start(op, run(front, x, no_communication, Tensor.div_))
    return work.then(lambda total: run(behind, total, lambda op, x: start(op, x).wait(), Tensor.div_))


def overlap_means(
    value: Tensor, anchors: Sequence[Tensor], inputs: Sequence[Tensor], places: Sequence[Place | None]
) -> None:
    """Have the gathers behind ``anchors`` take the means of the gradients that each of them makes alone.

    Args:
        value: what is differentiated.
        anchors: those of the boundary; their nodes know the gathers.
        inputs: what it is differentiated by.
        places: of each input that is a shard its buffer's key and its layout.
    """
    gathers: list[Any] = [node for x in anchors if hasattr(node := x.grad_fn, "session")]
    pairs = enumerate(zip(inputs, places, strict=True)) if gathers else ()
    averaged = {id(x): i for i, (x, place) in pairs if _is_averaged(x, place)}
    uses = _uses(value, gathers) if averaged else Counter[int]()
    alone = {leaf: i for leaf, i in averaged.items() if uses[leaf] == 1}
    for node in gathers if alone else ():
        layout = node.session.layout
        found = {key: alone.get(_leaf(behind)) for key, behind in zip(node.keys, nodes_behind(node), strict=True)}
        own = {key: i for key in reversed(layout.buffers) if (i := found.get(key)) is not None}
        same = {key: i for key, i in own.items() if places[i] == (key, layout)}
        node.session.reductions.means = Means(same, partial(start_mean, layout, node.device))


def _is_averaged(x: Tensor, place: Place | None) -> bool:
    """Whether the mean of the gradient by ``x`` needs replicas, which have a process group of their own."""
    if place is None or not x.is_floating_point():
        return False
    key, layout = place
    plan = layout.schedule(layout.buffers[key])
    has_replicas = layout.buffers[key].num_shards > 1 and any(isinstance(op, AllReduce) for op in plan.across)
    return has_replicas and (plan.dtypes.returned == x.dtype or x.grad_dtype is None)


def _uses(value: Tensor, gathers: Sequence[Any]) -> Counter[int]:
    """How often the graph behind ``value`` and ``gathers`` takes each of its leaves, by id."""
    edges = (behind for node in nodes(value.grad_fn, *gathers) for behind in nodes_behind(node))
    return Counter([id(value), *map(_leaf, edges)])


def _leaf(node: Any) -> int:
    """The id of the leaf whose gradient ``node`` adds up; -1 for other nodes."""
    leaf = getattr(node, "variable", None)
    return -1 if leaf is None else id(leaf)
