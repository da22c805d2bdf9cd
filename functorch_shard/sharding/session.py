"""The session of one lazy ``gather``: its units, gathered ahead of their use and freed, by the order of use.

Note [Residency]: at most two large units of a ``gather`` are whole: the one in use and the one that is gathered ahead
of it, or where none follows the one before it. What is next is guessed: in forward the unit that last followed these
two, the one before and this one; at first by the order of the parameters. In backward what came before in forward. A
wrong guess costs two gathers, its own and that of the unit it evicted, so where nothing is known there is no guess.
Decisions do not depend on a clock, on what has arrived or on what the garbage collector has done: all ranks gather in
the same order, whatever their timing.

Note [Streams]: a gathered buffer may be used on any stream of a device. It is finished on the stream that its gather
was started on, which all of its memory is from; an event marks when it is complete, and every other stream waits for
that event once. ``record_stream`` reports such a stream to the allocator, so that freed memory is not reused before the
stream is done. Copies of pinned memory have a stream each way, on which they wait for no kernel but the one that made
what is copied; a unit's event is recorded before the copy of the next one is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..communication.backend import Axis, Finished, Work
from ..communication.writes import bit_sum
from ..layout.layout import Layout, shard_axis
from ..layout.trees import unpack
from ..storage.memory_kind import MemoryKind
from ..torch_internals.autograd import NO_PASS, backward_pass, without_batches
from ..torch_internals.tensors import write_count
from .reduction import Part, Reductions

# Units so small that all of them together are no more than this part of the largest one (norms, scalars, position
# tables) stay once they are gathered: a gather costs a round of messages however little it moves, and a unit of a
# scalar that every block uses would evict the block at each use.
SMALL_PART = 1 / 8


class Streams(NamedTuple):
    """The streams of a device: which is current, how to make one so for a while, and those for copies each way."""

    current: Callable[[], Any]
    on: Callable[[Any], AbstractContextManager[Any]]
    from_host: Any
    to_host: Any


@cache  # the allocator keeps memory for each stream
def streams_of(device: torch.device) -> Streams | None:
    """Return the streams of ``device``, or None if it has none: it does everything in order."""
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if not hasattr(module, "current_stream"):
        return None
    current = lambda: module.current_stream(device)  # noqa: E731
    return Streams(current, module.stream, torch.Stream(device), torch.Stream(device))


class RecordedEvent:
    """An event on the current stream, after all that it has to do so far; and the streams that wait for it already."""

    __slots__ = ("_event", "_known", "_streams")

    def __init__(self, streams: Streams) -> None:
        stream = streams.current()
        self._streams, self._known, self._event = streams, {stream}, stream.record_event()

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Let the current stream use ``tensors``, which were made before the event."""
        stream = self._streams.current()
        if stream not in self._known:
            stream.wait_event(self._event)
            for x in tensors:
                x.record_stream(stream)
            self._known.add(stream)


def _put(kinds: Mapping[str, MemoryKind], streams: Streams | None, key: str, total: Tensor) -> Tensor | Work:
    """Put a reduced gradient where its shard is; the host waits for a copy to pinned memory when it is waited for."""
    kind = kinds.get(key)
    if kind is None:
        return total
    if not kind.pinned or streams is None or total.is_cpu:
        return kind.put(total)
    made, out = RecordedEvent(streams), kind.new(total)
    with streams.on(streams.to_host):
        made.take([total])
        out.copy_(total, non_blocking=True)
        done = streams.current().record_event()

    def copied() -> Tensor:
        done.synchronize()
        return out

    return Work(copied)


class UnitBuffers:
    """The shards of a part, and the whole buffers while they are resident; dims before the last are batch dims."""

    __slots__ = ("_sent_on", "_streams", "_versions", "_works", "device", "flats", "left_in", "made", "part", "shards")

    def __init__(self, part: Part, shards: Sequence[Tensor], device: torch.device, streams: Streams | None) -> None:
        self.part, self.device, self._streams = part, device, streams
        self.made: RecordedEvent | None = None
        self.shards = [shard.detach() for shard in shards]
        self._versions = _versions(self.shards)
        self._works: list[Work] | None = None
        self.flats: list[Tensor] | None = None
        self.left_in: int | None = None  # the backward pass that is done with it

    def numel(self, index: int) -> int:
        """Elements of a whole buffer, batch and all."""
        return self.shards[index].numel() * self.part.buffers[index].num_shards

    def start(self) -> None:
        """Start the all-gathers."""
        if self.flats is not None or self._works is not None:
            return
        self._check_unchanged()
        if self._streams is not None:
            from_host = self.shards[0].is_cpu and self.device.type != "cpu"
            self._sent_on = self._streams.from_host if from_host else self._streams.current()
        with self._where_sent():
            self._works = [self._gather(i) for i in range(len(self.shards))]

    def wait(self) -> None:
        """Wait for the all-gathers."""
        if self.flats is None:
            self.start()
            assert self._works is not None
            with self._where_sent():
                self.flats, self._works = [work.wait().contiguous() for work in self._works], None
                self.made = None if self._streams is None else RecordedEvent(self._streams)

    def drop(self) -> None:
        """Free the gathered buffers."""
        self.flats = self._works = None

    def _gather(self, i: int) -> Work:
        """Start to gather buffer ``i``, by its schedule."""
        schedule, shard, codec = self.part.schedules[i], self.shards[i], self.part.codec
        axis = schedule.shard_axis
        if axis is None:
            return Finished(self._copied(shard, schedule.gathered))
        if codec is None or not schedule.stored.is_floating_point:
            return self._all_gather(axis, shard, schedule.gathered)
        x, send = shard.to(self.device, non_blocking=True), partial(self._all_gather, axis)
        return codec.gather(x, axis.size, send).then(lambda whole: whole.to(schedule.gathered))

    def _all_gather(self, axis: Axis, x: Tensor, dtype: torch.dtype | None = None) -> Work:
        """In ``dtype``, cast on the way; ranks are laid side by side in the last dim."""
        if x.ndim > 1:
            rows = self._copied(x, dtype or x.dtype)
            return Work(lambda: axis.issue("all_gather", rows, dim=rows.ndim - 1).wait().contiguous())
        return axis.issue("all_gather", x, dtype=dtype, device=self.device, transient=True)

    def _copied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """As it is now, row-major in memory of its own: a shard may be a view, and may be written to meanwhile."""
        return x.new_empty(x.shape, dtype=dtype, device=self.device).copy_(x, non_blocking=True)

    def _where_sent(self) -> AbstractContextManager[object]:
        """The stream of the gathers; what is made in inference mode may not be saved for a backward after it."""
        inference = torch.is_inference_mode_enabled()
        if self._streams is None and not inference:
            return nullcontext()
        contexts = ExitStack()
        if inference:
            contexts.enter_context(torch.inference_mode(False))
        if self._streams is not None:
            contexts.enter_context(self._streams.on(self._sent_on))
        return contexts

    def _check_unchanged(self) -> None:
        if _versions(self.shards) != self._versions:
            keys = ", ".join(map(repr, self.part.keys))
            raise RuntimeError(
                f"gather: {keys}: the shards were written to (for example by a step with donate=True) after they were "
                "gathered, and a lazy parameter would now have other values than before. Gather again from the new "
                "shards, or take plain values with gather(params, lazy=False)."
            )


def _versions(shards: Sequence[Tensor]) -> list[int]:
    """How often each was written to; of an inference tensor, which does not count that, what it holds."""
    return [int(bit_sum([without_batches(shard)])) if shard.is_inference() else write_count(shard) for shard in shards]


class Session:
    """All buffers of one ``gather``, whole and pending; freed with the last lazy tensor.

    The first ``UnitBuffers`` of a part are gathered ahead with its unit. Nothing in a session refers back to it.
    ``offloaded``: the memory kind of each shard on the CPU that another device computes with, and of its gradient.
    """

    def __init__(self, layout: Layout, offloaded: Mapping[str, MemoryKind], lazy: bool = True) -> None:
        self.layout, self.offloaded, self.lazy = layout, offloaded, lazy
        self._streams = streams_of(layout.mesh.device)
        self.rank: object = None  # of ranks that are threads, the one that gathered
        self.reductions = Reductions(partial(_put, offloaded, self._streams))
        self._order = UseOrder(layout)
        self._buffers: dict[int, dict[Part, UnitBuffers]] = {}
        self._resident: dict[int, list[UnitBuffers]] = {}  # from the least to the most recently used unit

    def add(self, part: Part, shards: Sequence[Tensor]) -> UnitBuffers:
        mesh_device = self.layout.mesh.device
        device = mesh_device if shards[0].is_cpu else shards[0].device
        buffers = UnitBuffers(part, shards, device, self._streams if device == mesh_device else streams_of(device))
        self._buffers.setdefault(part.unit, {}).setdefault(part, buffers)
        return buffers

    def data(self, buffers: UnitBuffers, index: int) -> Tensor:
        """The whole buffer ``index`` of ``buffers`` for the current stream; their unit is in use from now on."""
        if self.rank is not None and shard_axis(self.layout).backend.ready() != self.rank:
            raise RuntimeError(
                "gather: a simulated rank uses a lazy parameter that another one gathered and put into a module, or "
                "another object, that they share. Give each rank its own module: fs.bind(model, full)."
            )
        if buffers.flats is None or buffers.part.unit != self._order.current:
            self._arrive(buffers)
        assert buffers.flats is not None
        if buffers.made is not None:
            buffers.made.take(buffers.flats)
        return buffers.flats[index]

    def take(self, buffers: UnitBuffers) -> tuple[Tensor, ...]:
        """Gather the parameters of ``buffers`` now, into memory of their own, and free the buffers."""
        part = buffers.part
        if part.is_sharded:
            self.reductions.gathered.setdefault(part)
        if all(schedule.shard_axis is None for schedule in part.schedules):  # copied once, below
            pairs = zip(buffers.shards, part.schedules, strict=True)
            buffers.flats = [x.to(buffers.device, schedule.gathered) for x, schedule in pairs]
        buffers.wait()
        assert buffers.flats is not None
        if buffers.made is not None:
            buffers.made.take(buffers.flats)
        pairs = zip(buffers.flats, part.buffers, strict=True)
        copies = tuple(x for flat, buffer in pairs for x in unpack(flat, buffer).values())
        buffers.drop()
        return copies

    def leave(self, part: Part, now: int, tangents: bool = False) -> None:
        """Free ``part``: its gradients are complete, and backward is done with it. Frozen parts of its unit stay.

        With ``tangents`` also the parts with its tangents, which backward goes through at the same time.
        """
        for buffers in self._resident.get(part.unit, []):
            if buffers.part is part or (tangents and buffers.part.tangent_of is part):
                buffers.drop()
                buffers.left_in = now

    def _arrive(self, buffers: UnitBuffers) -> None:
        unit, now = buffers.part.unit, backward_pass()
        if unit != self._order.current:  # the most recently used one from now on
            self._resident[unit] = self._resident.pop(unit, [])
        evict, fetch = self._order.arrive(unit, now, self._resident, torch.is_grad_enabled())
        for other in evict:
            for evicted in self._resident.pop(other):
                evicted.drop()
        self._fetch(buffers, now)
        # Before what is next is sent: the events of this unit come before its copies, and ranks of one host that have
        # sent this one have freed what was before it, so a rank that is ahead takes no more memory than the others.
        for each in self._resident[unit]:
            if each._works is not None:
                each.wait()
        for other in fetch:
            for ahead in self._buffers.get(other, {}).values():
                if ahead.left_in != now:
                    self._fetch(ahead, now)

    def _fetch(self, buffers: UnitBuffers, now: int) -> None:
        gathered = self._resident.setdefault(buffers.part.unit, [])
        if buffers not in gathered:
            gathered.append(buffers)
            if now == NO_PASS and buffers.part.is_sharded:
                self.reductions.gathered.setdefault(buffers.part)
        buffers.start()


class UseOrder:
    """The order in which the units of one ``gather`` were used, and what to do next by it."""

    def __init__(self, layout: Layout) -> None:
        if UseOrder not in layout.derived:
            small = small_units(layout)
            trainable = (i for i, unit in enumerate(layout.units) if any(buffer.trainable for buffer in unit.buffers))
            layout.derived[UseOrder] = expected_order(layout, small), small, next(trainable, 0)
        # which come next at first, which stay, and how many are frozen in front, which backward seldom needs
        expected, self._small, self._frozen_in_front = layout.derived[UseOrder]
        self._keeps = not layout.reshard_after_forward
        self.current: int | None = None
        self._next: dict[tuple[int | None, int], int] = {}  # of a unit that came after another one
        self._next.update(zip(zip([None, *expected], expected, strict=False), expected[1:], strict=False))
        self._last: tuple[int | None, int | None] = None, None  # the last two in forward
        self._used: list[int] = []  # in forward, for backward
        self._backward_pass = NO_PASS
        self._position = 0  # in that list, of the backward pass
        self._end = 0  # where in that list backward ends

    def arrive(
        self, unit: int, backward_pass: int, resident: Iterable[int], with_graph: bool
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return units to free and units to gather behind ``unit``, which is used now.

        ``resident`` ones come from the least to the most recently used. ``with_graph``: backward may follow.
        """
        if unit == self.current or unit in self._small:
            return (), ()
        self.current = unit
        ahead = self._forward(unit, with_graph) if backward_pass == NO_PASS else self._backward(unit, backward_pass)
        large = [other for other in resident if other not in self._small and other != unit]
        kept = large[-1:] if ahead is None else [ahead]  # where none follows, the last one may stay
        evict = [] if self._keeps else [other for other in large if other not in kept]
        if ahead is None:
            return evict, ()
        on_the_way = [other for other in range(unit + 1, ahead) if other in self._small] if self._small else ()
        return evict, [*on_the_way, ahead]

    def _forward(self, unit: int, with_graph: bool) -> int | None:
        before, last = self._last
        if last is not None and last != unit:
            self._next[before, last] = unit
        self._last = last, unit
        self._used += [unit] if with_graph else []
        return self._next.get(self._last)

    def _backward(self, unit: int, backward_pass: int) -> int | None:
        """From where it was used nearest to here, on in the same direction; at the turn, back."""
        if backward_pass != self._backward_pass:
            self._backward_pass, self._position, self._last = backward_pass, len(self._used) - 1, (None, None)
            needed = [i for i, other in enumerate(self._used) if other >= self._frozen_in_front]
            self._end = max(needed[0] if needed else 0, 1)  # nothing was computed before the first one
        places = [(abs(i - self._position), i) for i, other in enumerate(self._used) if other == unit]
        if not places:
            return None
        _, i = min(places)
        ahead = i + (1 if i > self._position else -1)
        self._position = i
        return self._used[ahead] if self._end <= ahead < len(self._used) and self._used[ahead] != unit else None


def small_units(layout: Layout) -> frozenset[int]:
    """The units that stay whole once they are gathered: together at most ``SMALL_PART`` of the largest one."""
    sizes = sorted((sum(buffer.nbytes for buffer in unit.buffers), i) for i, unit in enumerate(layout.units))
    limit = SMALL_PART * sizes[-1][0] if sizes else 0
    sums = accumulate(size for size, _ in sizes)
    return frozenset(i for (_, i), total in zip(sizes, sums, strict=True) if total <= limit)


def expected_order(layout: Layout, small: Set[int]) -> list[int]:
    """The large units in the order that a model uses them in, as far as the order of its parameters suggests.

    A unit with parameters before and after those of others (embedding and head of one unit) comes more than once; so
    does a unit that is tied, if it is the only one.
    """
    unit_of = {slot.name: i for i, unit in enumerate(layout.units) for buffer in unit.buffers for slot in buffer.slots}
    in_source = [unit_of[name] for name in layout.slots if unit_of[name] not in small]
    tied = {unit_of[name] for _, name in layout.aliases} - small
    return [unit for unit, _ in groupby([*in_source, *(tied if len(tied) == 1 else ())])]
