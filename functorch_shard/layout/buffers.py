"""Slots, buffers and units: the place of a parameter in a flat buffer, and padding."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import axes_text
from .precision import MixedPrecision

Reduction = Literal["mean", "sum"]
OWNERS = "(owners)"  # the unit of optimizer state that owners of whole parameters have; no module has this name


class Slice(NamedTuple):
    """The part of one parameter that one shard holds: ``shard[offset:offset + numel]`` is ``p.flatten()[start:]``."""

    name: str
    offset: int
    numel: int
    start: int


@dataclass(frozen=True, slots=True)
class DTensorForm:
    """The shape of a DTensor and its placements along the axes of its device mesh.

    ``placements`` has one entry for each of ``axes``: ``"S(dim)"`` for sharded along ``dim``, ``"R"`` for replicated.
    """

    shape: tuple[int, ...]
    placements: tuple[str, ...]
    axes: tuple[tuple[str, int], ...]

    @property
    def cut_over(self) -> tuple[str, ...]:
        """The axes whose ranks hold different elements, which a norm sums over; the ranks of others hold copies."""
        return tuple(name for (name, _), text in zip(self.axes, self.placements, strict=True) if text != "R")

    def part_at(self, place: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape and the start of the part of rank ``place[i]`` of each axis, chunked like ``torch.chunk``."""
        shape, start = list(self.shape), [0] * len(self.shape)
        for (_, size), text, index in zip(self.axes, self.placements, place, strict=True):
            if text != "R":
                dim = int(text[2:-1])
                chunk = -(-shape[dim] // size)
                skipped = min(index * chunk, shape[dim])
                start[dim] += skipped
                shape[dim] = min(chunk, shape[dim] - skipped)
        return tuple(shape), tuple(start)

    def __str__(self) -> str:
        return f"DTensor of shape {self.shape}, {' '.join(self.placements)} over {axes_text(dict(self.axes))}"


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in its buffer; ``index`` is its position among the source's parameters.

    For a DTensor the slot holds this rank's local part; ``dtensor`` describes the whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    numel: int
    index: int
    dtensor: DTensorForm | None = None

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Buffer:
    """One flat tensor of one dtype, label and trainability, with one slot or more; ``numel`` includes padding."""

    key: str
    label: str
    trainable: bool
    numel: int
    num_shards: int
    slots: tuple[Slot, ...] = field(repr=False)

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.slots[0].dtype

    @cached_property
    def differentiable(self) -> bool:
        """Whether its dtype has gradients, trainable or not."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @cached_property
    def shard_numel(self) -> int:
        return self.numel // self.num_shards

    @cached_property
    def parameter_numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def slices(self, rank: int) -> list[Slice]:
        """The parts of parameters in shard ``rank``, in order; an empty parameter is in no shard."""
        low = (rank if self.num_shards > 1 else 0) * self.shard_numel
        high = low + self.shard_numel
        first = bisect_right(self.slots, low, key=lambda slot: slot.end)
        behind = bisect_left(self.slots, high, lo=first, key=lambda slot: slot.offset)
        return [part for slot in self.slots[first:behind] if (part := self.part(slot, rank)).numel]

    def part(self, slot: Slot, rank: int) -> Slice:
        """What shard ``rank`` holds of one parameter: 0 elements, if it is elsewhere."""
        low = (rank if self.num_shards > 1 else 0) * self.shard_numel
        start, end = max(slot.offset, low), min(slot.end, low + self.shard_numel)
        return Slice(slot.name, start - low, max(end - start, 0), start - slot.offset)

    @cached_property
    def split_sizes(self) -> list[int]:
        """Sizes that cut the buffer into gap, slot, gap, ..., slot, gap: the gaps are padding and may be 0."""
        bounds = [0, *(edge for slot in self.slots for edge in (slot.offset, slot.end)), self.numel]
        return [b - a for a, b in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Unit:
    """The buffers that are gathered together, for example those of a transformer block, and their dtypes."""

    name: str
    buffers: tuple[Buffer, ...] = field(repr=False)
    precision: MixedPrecision = field(default_factory=MixedPrecision)


def padded(numel: int, step: int) -> int:
    """``numel`` rounded up to a multiple of ``step``."""
    return -(-numel // step) * step


def aligned(taken: int, dtype: torch.dtype, align_bytes: int) -> int:
    """The offset of the next slot after ``taken`` elements; ``align_bytes`` 0 packs without gaps."""
    return padded(taken, alignment(dtype, align_bytes))


def alignment(dtype: torch.dtype, align_bytes: int) -> int:
    """The number of elements that offsets are multiples of."""
    return lcm(align_bytes, dtype.itemsize) // dtype.itemsize or 1


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def without_padding(shard: Tensor, buffer: Buffer, rank: Tensor | int) -> Tensor:
    """Set the padding of ``shard`` to zero; return it unchanged if ``buffer`` has no padding.

    ``rank`` is the index of the shard: an int, or on simulated ranks a batched tensor of shape ``()``.
    """
    if buffer.numel == buffer.parameter_numel:
        return shard
    if isinstance(rank, Tensor):
        owned = of_rank(slot_of_each(buffer, shard.device), rank) < len(buffer.slots)
    else:
        blank = torch.zeros(buffer.shard_numel, dtype=torch.bool, device=shard.device)
        owned = overlaid(blank, [(offset, ~blank[:numel]) for _, offset, numel, _ in buffer.slices(rank)])
    return torch.where(owned, shard, 0)


def slot_of_each(buffer: Buffer, device: torch.device) -> Tensor:
    """The index of the slot of each element, one row per shard; ``len(buffer.slots)`` for padding."""
    blank = torch.full((buffer.numel,), len(buffer.slots), device=device)
    parts = [(slot.offset, torch.full((slot.numel,), i, device=device)) for i, slot in enumerate(buffer.slots)]
    return overlaid(blank, parts).view(buffer.num_shards, -1)


def of_rank(rows: Tensor, rank: Tensor | int) -> Tensor:
    """The row of this rank; ``rows`` has one row if ``rank`` is an int, otherwise all rows."""
    return rows.index_select(0, rank.reshape(1).to(rows.device)).squeeze(0) if isinstance(rank, Tensor) else rows[0]


def overlaid(blank: Tensor, parts: Iterable[tuple[int, Tensor]]) -> Tensor:
    """``blank``, of one dim, with ``parts`` from their offsets on, which are in order.

    Not written in place: ``torch.func.linearize`` forgets what is written to a view of a constant.
    """
    pieces, end = list[Tensor](), 0
    for offset, part in parts:
        pieces += [blank[end:offset], part]
        end = offset + part.numel()
    return torch.cat([*pieces, blank[end:]])
