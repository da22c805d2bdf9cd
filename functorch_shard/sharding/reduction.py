"""Reductions of full gradients while backward goes on, by the schedule of each buffer.

Note [Unused units]: backward starts the reduction of a unit when it reaches the unit's node. On a rank whose loss does
not depend on the unit it never does, while the other ranks wait for its addend. So inside of ``fs.grad`` every rank
makes one reduction for each part that it gathered, used or not; what was gathered is the same on all ranks, or the
gathers would have been refused (Note [Envelopes]). The order is the same too, the last gathered first, as in backward:
before the reduction of a part, those before it whose nodes this pass does not reach are made with zeros, and at the end
the rest. That end is the backward of a node in front of all shards. The pass always reaches it, because ``fs.grad``
differentiates its *anchor*, an output without a use, along with the loss.

What no rank used is refused, by all ranks or by none. A rank whose loss uses no part adds -0.0, the identity of
addition (0.0 is not: -0.0 + 0.0 = 0.0), so a sum is -0.0 where no rank had anything to add.

Elsewhere (``backward()``, a reentrant checkpoint) it is not known which pass is the last one, and nothing is added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, takewhile
from threading import RLock
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..collectives.rules import Encoding, Schedule
from ..collectives.sinks import Sink
from ..communication.backend import Work
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..layout.trees import pack
from ..torch_internals.autograd import backward_comes_to


class Place(NamedTuple):
    """A view of a parameter in a whole buffer of its part, as numbers that Python has."""

    buffer: int
    shape: Sequence[int]
    strides: Sequence[int]
    offset: int
    dtype: torch.dtype
    start: int  # the offset of the parameter


@dataclass(frozen=True, eq=False)
class Part:
    """Buffers of one unit that are gathered, differentiated and reduced together, and how they are gathered."""

    unit: int
    buffers: tuple[Buffer, ...]
    layout: Layout
    dtype: torch.dtype | None = None
    codec: Encoding | None = None
    tangent_of: Part | None = None

    @cached_property
    def is_sharded(self) -> bool:
        return any(buffer.num_shards > 1 for buffer in self.buffers)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        return tuple(buffer.key for buffer in self.buffers)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return tuple(slot.name for buffer in self.buffers for slot in buffer.slots)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """How each buffer is gathered and its gradient reduced."""
        return tuple(self.layout.schedules[buffer.key, self.dtype] for buffer in self.buffers)

    @cached_property
    def mean(self) -> tuple[bool, bool]:
        """Whether backward has a mean to take, and whether taking it is the transpose of the gather."""
        return any(s.has_mean for s in self.schedules), all(s.mean_is_transpose for s in self.schedules)

    @cached_property
    def places(self) -> list[Place]:
        """Where each parameter is in its whole buffer."""
        return self.places_of([()] * len(self.buffers))

    def places_of(self, batches: Sequence[Sequence[int]]) -> list[Place]:
        """The same where there is a whole buffer for each of a batch."""
        groups = enumerate(zip(self.buffers, batches, self.schedules, strict=True))
        return [
            Place(i, (*batch, *slot.shape), strides, slot.offset, schedule.gathered, slot.offset)
            for i, (buffer, batch, schedule) in groups
            for slot in buffer.slots
            for strides in [(*_strides(batch, buffer.numel), *_strides(slot.shape))]
        ]


def parts_of(keys: Collection[str], layout: Layout, dtype: torch.dtype | None, codec: Encoding | None) -> list[Part]:
    """The parts of buffers ``keys``: of each unit frozen buffers are one by themselves, and integers."""
    if (which := (Part, *keys, dtype, codec)) in layout.derived:
        return layout.derived[which]
    groups: dict[tuple[int, bool, bool], list[Buffer]] = {}
    for i, unit in enumerate(layout.units):
        for buffer in unit.buffers:
            if buffer.key in keys:
                kind = i, buffer.trainable, buffer.differentiable
                groups.setdefault(kind, []).append(buffer)
    parts = [Part(unit, tuple(buffers), layout, dtype, codec) for (unit, _, _), buffers in groups.items()]
    if codec is None:
        layout.derived[which] = parts
    return parts


def _strides(sizes: Sequence[int], inner: int = 1) -> tuple[int, ...]:
    """Those of contiguous rows of ``inner`` elements."""
    behind = accumulate(reversed(sizes), lambda product, size: product * max(size, 1), initial=max(inner, 1))
    return tuple(reversed([*behind][:-1]))


Put = Callable[[str, Tensor], "Tensor | Work"]


class Reductions:
    """The reductions of the backward passes over one ``gather``, started as gradients come.

    One part is reduced at a time: the next waits for it, and so one full gradient is freed before another is packed,
    in the same memory. A pass that runs inside another (a hook, a reentrant checkpoint) has its own results.
    Autograd may call from several threads: a call that comes while another one waits for a message waits for it too.

    Args:
        put: takes what a reduction made, by the key of its buffer, as soon as it is complete; returns what to hand on.
    """

    def __init__(self, put: Put = lambda _, total: total) -> None:
        self.put = put
        self._one_at_a_time = RLock()
        self._started: list[tuple[int, str, Work]] = []
        self._results: dict[tuple[int, str], Tensor | Work] = {}
        self._scratch: dict[int, Tensor] = {}
        self.nodes: dict[Part, ref[Any]] = {}  # whose backward reduces parts, if all ranks gather them
        self.gathered: dict[Part, None] = {}  # by all ranks, in this order
        self._left: dict[int, dict[Part, None]] = {}  # what a backward pass did not reduce yet, the last gathered first

    def start(
        self, part: Part, grads: Iterable[Tensor], wanted: Iterable[int], backward_pass: int, sink: Sink, mean: bool
    ) -> None:
        """Start to reduce the gradients of the ``wanted`` buffers of ``part``, and before it those that are owed.

        With ``mean`` to the mean over ranks, or else to the sum over those that share a buffer.
        """
        with self._one_at_a_time:
            left = self._parts_left(backward_pass)
            if part in left:
                earlier = [*takewhile(lambda other: other is not part, left)]
                nodes = {other: self.nodes[other]() for other in earlier}
                never = [other for other, node in nodes.items() if node is None or not backward_comes_to(node)]
                self._start_zeros(never, backward_pass, sink)
                del left[part]
            self._wait()
            by_name = dict(zip(part.names, grads, strict=True))
            for i in wanted:
                buffer, like = part.buffers[i], by_name[part.buffers[i].slots[0].name]
                # where there is nothing to add up now, what is packed may be the result, and is in new memory
                sharded = buffer.num_shards > 1 and like.layout is torch.strided  # pack refuses others
                schedule = part.schedules[i]
                scratch = self._scratch_for(i, buffer, like, schedule.reduced) if sharded else None
                packed = pack(by_name, buffer, out=scratch)
                self._started.append((backward_pass, buffer.key, schedule.reduce(packed, mean)))

    def finish(self, keys: Sequence[str], backward_pass: int, sink: Sink) -> list[Tensor | None]:
        """Reduce what ``backward_pass`` did not reach, and return what it made for the buffers ``keys``, once."""
        with self._one_at_a_time:
            self._start_zeros([*self._parts_left(backward_pass)], backward_pass, sink)
            del self._left[backward_pass]
            self._wait()
            results = [self._results.pop((backward_pass, key), None) for key in keys]
            return [x.wait() if isinstance(x, Work) else x for x in results]

    def _parts_left(self, backward_pass: int) -> dict[Part, None]:
        if backward_pass not in self._left:
            self._left[backward_pass] = {part: None for part in reversed(self.gathered) if part in self.nodes}
        return self._left[backward_pass]

    def _start_zeros(self, parts: Sequence[Part], backward_pass: int, sink: Sink) -> None:
        """Reduce what this rank has to add to the gradients of parts that its loss does not depend on."""
        for part in parts:
            del self._left[backward_pass][part]
            self._wait()
            for buffer, schedule in zip(part.buffers, part.schedules, strict=True):
                device = part.layout.mesh.device
                zeros = torch.full((buffer.numel,), sink.nothing, dtype=schedule.reduced, device=device)
                self._started.append((backward_pass, buffer.key, schedule.reduce(zeros, sink.averages)))

    def _scratch_for(self, place: int, buffer: Buffer, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory that is written again and again: fresh pages cost as much as what is written to them."""
        scratch = self._scratch.get(place)
        if scratch is None or scratch.dtype != dtype or scratch.numel() < buffer.numel:
            scratch = self._scratch[place] = like.new_empty(buffer.numel, dtype=dtype)
        return scratch[: buffer.numel]

    def _wait(self) -> None:
        """Wait for what was started, and put it where it belongs."""
        while self._started:
            backward_pass, key, work = self._started.pop(0)
            self._results[backward_pass, key] = self.put(key, work.wait())
