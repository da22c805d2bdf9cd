"""The all-gathered units of one ``gather``: held here, freed and gathered again as ``prefetch_policy`` decides.

A ``Session`` belongs to one call of ``gather``; it holds the ``UnitBuffers`` and asks the policy at each use. Which
units are whole at a moment: Note [Residency] in prefetch_policy.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ..communication.backend import Work
from ..communication.writes import content_of
from ..layout.buffers import Buffer, Slot
from ..layout.layout import Layout, shard_axis
from ..layout.schedule import Encoding, Ops, Schedule, gathered_encoded
from ..storage.memory_kind import MemoryKind, working_device
from ..torch_internals.autograd import backward_pass
from ..torch_internals.tensors import version_of
from .asynchronous import Reductions, start_gather
from .prefetch_policy import use_order
from .streams import RecordedEvent, Streams, streams_of
from .unused import Owed

# The buffer, shape, strides and offset there, dtype, and the offset of its parameter.
Place = tuple[int, tuple[int, ...], tuple[int, ...], int, torch.dtype, int]


@dataclass(frozen=True, eq=False)
class Part:
    """Buffers of one unit that are gathered and differentiated together, and the dtype they are gathered in."""

    unit: int
    buffers: tuple[Buffer, ...]
    layout: Layout
    dtype: torch.dtype | None
    codec: Encoding | None = None
    joined: bool = False  # whether a node behind it waits for its reductions
    tangent_of: Part | None = None

    @cached_property
    def is_sharded(self) -> bool:
        return all(buffer.num_shards > 1 for buffer in self.buffers)

    @cached_property
    def has_shards(self) -> bool:
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
    def places(self) -> list[Place]:
        """Where each parameter is in its whole buffer."""
        return self.places_of([()] * len(self.buffers))

    def places_of(self, batches: Sequence[Sequence[int]]) -> list[Place]:
        """The same where there is a whole buffer for each of a batch."""
        groups = enumerate(zip(self.buffers, batches, self.schedules, strict=True))
        return [
            (i, *_place(slot, buffer, batch), schedule.dtypes.gathered, slot.offset)
            for i, (buffer, batch, schedule) in groups
            for slot in buffer.slots
        ]

    @cached_property
    def has_mean(self) -> bool:
        return any(s.has_mean for s in self.schedules)

    @cached_property
    def mean_is_transpose(self) -> bool:
        return all(s.mean_is_transpose for s in self.schedules)

    @cached_property
    def with_node(self) -> Part:
        """The same with a node behind it that waits for its reductions."""
        return replace(self, joined=True)

    @cached_property
    def gather_ops(self) -> tuple[Ops, ...]:
        """The operations that gather each buffer."""
        return tuple(
            gathered_encoded(s.gather, s.dtypes, self.codec) if self.codec and b.dtype.is_floating_point else s.gather
            for b, s in zip(self.buffers, self.schedules, strict=True)
        )


def _place(slot: Slot, buffer: Buffer, batch: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset of a parameter in the whole buffer, of which there is one for each of a batch."""
    if not batch:
        return slot.shape, _strides(slot.shape), slot.offset
    return (*batch, *slot.shape), (*_strides((*batch, buffer.numel))[:-1], *_strides(slot.shape)), slot.offset


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    behind = accumulate(reversed(shape[1:]), lambda product, size: product * max(size, 1), initial=1)
    return tuple(reversed([*behind]))[: len(shape)]


class UnitBuffers:
    """The shards of a part, and the whole buffers while they are resident; dims before the last are batch dims."""

    __slots__ = ("_sent_on", "_streams", "_versions", "_works", "device", "flats", "left_in", "made", "part", "shards")

    def __init__(self, part: Part, shards: Sequence[Tensor], streams: Streams | None) -> None:
        self.part, self.device = part, working_device(shards[0], part.layout.mesh.device)
        self._streams = streams
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
            self._sent_on = self._streams.copies() if from_host else self._streams.current()
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
        part, key = self.part, self.part.buffers[i].key
        return start_gather(part.gather_ops[i], self.shards[i], key, part.layout.mesh, self.device)

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
            keys = ", ".join(repr(buffer.key) for buffer in self.part.buffers)
            raise RuntimeError(
                f"gather: {keys}: the shards were written to (for example by a step with donate=True) after they were "
                "gathered, and a lazy parameter would now have other values than before. Gather again from the new "
                "shards, or take plain values with gather(params, lazy=False)."
            )


def _versions(shards: Sequence[Tensor]) -> list[int]:
    """How often each was written to; of an inference tensor, which does not count that, what it holds."""
    return [content_of(shard) if (n := version_of(shard)) < 0 else n for shard in shards]


class Session:
    """All buffers of one ``gather``, whole and pending; freed with the last lazy tensor.

    The first ``UnitBuffers`` of a part are gathered ahead with its unit. Nothing in a session refers back to it.
    ``memory_kinds`` is where each buffer's shard is stored, and where its gradient is put; ``streams``, unless they are
    those of the device.
    """

    def __init__(
        self, layout: Layout, memory_kinds: Mapping[str, MemoryKind] | None = None, streams: Streams | None = None
    ) -> None:
        self.layout, self.memory_kinds = layout, memory_kinds or {}
        self._streams = streams or streams_of(layout.mesh.device)
        self.rank: object = None  # of ranks that are threads, the one that gathered
        self.reductions = Reductions(self.memory_kinds, self._streams)
        self.owed = Owed()
        self._order = use_order(layout)
        self._buffers: dict[int, dict[Part, UnitBuffers]] = {}
        self._resident: dict[int, list[UnitBuffers]] = {}  # from the least to the most recently used unit

    def add(self, part: Part, shards: Sequence[Tensor]) -> UnitBuffers:
        on_mesh = shards[0].is_cpu or shards[0].device == self.layout.mesh.device
        buffers = UnitBuffers(part, shards, self._streams if on_mesh else streams_of(shards[0].device))
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

    def leave(self, part: Part, tangents: bool = False) -> None:
        """Free ``part``: its gradients are complete, and backward is done with it. Frozen parts of its unit stay.

        With ``tangents`` also the parts with its tangents, which backward goes through at the same time.
        """
        for buffers in self._resident.get(part.unit, []):
            if buffers.part is part or (tangents and buffers.part.tangent_of is part):
                buffers.drop()
                buffers.left_in = backward_pass()

    def _arrive(self, buffers: UnitBuffers) -> None:
        unit, now = buffers.part.unit, backward_pass()
        if unit != self._order.current:  # the most recently used one from now on
            self._resident[unit] = self._resident.pop(unit, [])
        decision = self._order.arrive(unit, now, self._resident, torch.is_grad_enabled())
        for other in decision.evict:
            for evicted in self._resident.pop(other):
                evicted.drop()
        self._fetch(buffers, now)
        for other in decision.fetch:  # before waiting for this one: the network is never idle
            for ahead in self._buffers.get(other, {}).values():
                if ahead.left_in is None or ahead.left_in != now:
                    self._fetch(ahead, now)
        buffers.wait()

    def _fetch(self, buffers: UnitBuffers, now: int | None) -> None:
        gathered = self._resident.setdefault(buffers.part.unit, [])
        if buffers not in gathered:
            gathered.append(buffers)
            if now is None and buffers.part.is_sharded:
                self.owed.gather(buffers.part)
        buffers.start()
