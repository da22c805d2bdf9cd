"""The all-gathered units of one ``gather``: held here, freed and gathered again as ``prefetch_policy`` decides.

A ``Session`` belongs to one call of ``gather``; it holds the ``UnitBuffers`` and asks the policy at each use. Which
units are whole at a moment: Note [Residency] in prefetch_policy.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives.codecs import Codec
from ..communication.work import Work
from ..communication.writes import content_of
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..layout.ranks import shard_axis
from ..layout.schedule import Ops, Schedule, gathered_encoded
from ..storage.memory_kind import MemoryKind, working_device
from ..torch_internals.autograd import backward_pass
from ..torch_internals.tensors import version_of
from .asynchronous import Reductions, start_gather
from .prefetch_policy import use_order
from .streams import Streams, streams_of
from .unused import Owed


@dataclass(frozen=True, eq=False)
class Part:
    """Buffers of one unit that are gathered and differentiated together, and the dtype they are gathered in."""

    unit: int
    buffers: tuple[Buffer, ...]
    layout: Layout
    dtype: torch.dtype | None
    codec: Codec | None = None
    joined: bool = False  # whether a node behind it waits for its reductions
    tangent_of: Part | None = None

    @property
    def is_sharded(self) -> bool:
        return all(buffer.num_shards > 1 for buffer in self.buffers)

    def plan(self, buffer: Buffer) -> Schedule:
        return self.layout.schedule(buffer, self.dtype)

    def gather_ops(self, buffer: Buffer) -> Ops:
        plan = self.plan(buffer)
        encodes = self.codec is not None and buffer.dtype.is_floating_point
        return gathered_encoded(plan.gather, plan.dtypes, self.codec) if encodes else plan.gather


class UnitBuffers:
    """The shards of a part, and the whole buffers while they are resident; dims before the last are batch dims."""

    __slots__ = (
        "_made",
        "_sent_on",
        "_shards",
        "_streams",
        "_versions",
        "_works",
        "device",
        "flats",
        "left_in",
        "part",
    )

    def __init__(self, part: Part, shards: Sequence[Tensor], streams: Streams | None = None) -> None:
        self.part, self.device = part, working_device(shards[0], part.layout.mesh.device)
        self._streams = streams or streams_of(self.device)
        self._shards = [shard.detach() for shard in shards]
        self._versions = [_version(shard) for shard in self._shards]
        self._works: list[Work] | None = None
        self.flats: list[Tensor] | None = None
        self.left_in: int | None = None  # the backward pass that is done with it

    def numel(self, index: int) -> int:
        """Elements of a whole buffer, batch and all."""
        return self._shards[index].numel() * self.part.buffers[index].num_shards

    def shard(self, index: int) -> Tensor:
        """The shard of buffer ``index``."""
        return self._shards[index]

    def start(self) -> None:
        """Start the all-gathers."""
        if self.flats is None and self._works is None:
            self._check_unchanged()
            from_host = self._shards[0].is_cpu and self.device.type != "cpu"
            self._sent_on = self._streams.copies() if from_host else self._streams.current()
            pairs = zip(self.part.buffers, self._shards, strict=True)
            with _no_inference_mode(), self._streams.on(self._sent_on):
                self._works = [self._gather(buffer, shard) for buffer, shard in pairs]

    def wait(self) -> None:
        """Wait for the all-gathers."""
        self.start()
        if self._works is not None:
            with _no_inference_mode(), self._streams.on(self._sent_on):
                self.flats, self._works = [work.wait().contiguous() for work in self._works], None
                self._made = self._streams.made()

    def whole(self, index: int) -> Tensor:
        """The whole buffer ``index``, once it was waited for, for use on the current stream."""
        assert self.flats is not None
        self._made.take(self.flats)
        return self.flats[index]

    def drop(self) -> None:
        """Free the gathered buffers."""
        self.flats = self._works = None

    def _gather(self, buffer: Buffer, shard: Tensor) -> Work:
        return start_gather(self.part.gather_ops(buffer), shard, buffer.key, self.part.layout.mesh, self.device)

    def _check_unchanged(self) -> None:
        if [_version(shard) for shard in self._shards] != self._versions:
            keys = ", ".join(repr(buffer.key) for buffer in self.part.buffers)
            raise RuntimeError(
                f"gather: {keys}: the shards were written to (for example by a step with donate=True) after they were "
                "gathered, and a lazy parameter would now have other values than before. Gather again from the new "
                "shards, or take plain values with gather(params, lazy=False)."
            )


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
        buffers = UnitBuffers(part, shards, self._streams if on_mesh else None)
        self._buffers.setdefault(part.unit, {}).setdefault(part, buffers)
        return buffers

    def data(self, buffers: UnitBuffers, index: int) -> Tensor:
        """The whole buffer ``index`` of ``buffers``, whose unit is in use from now on."""
        if self.rank is not None and shard_axis(self.layout).backend.ready() != self.rank:
            raise RuntimeError(
                "gather: a simulated rank uses a lazy parameter that another one gathered and put into a module, or "
                "another object, that they share. Give each rank its own module: fs.bind(model, full)."
            )
        if buffers.flats is None or buffers.part.unit != self._order.current:
            self._arrive(buffers)
        return buffers.whole(index)

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
            self._evict(other)
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

    def _evict(self, unit: int) -> None:
        for buffers in self._resident.pop(unit):
            buffers.drop()


def _no_inference_mode() -> AbstractContextManager[object]:
    """What is made in inference mode may not be saved for a backward after it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _version(shard: Tensor) -> int:
    """How often ``shard`` was written to; of an inference tensor, which does not count that, what it holds."""
    return content_of(shard) if shard.is_inference() else version_of(shard)
