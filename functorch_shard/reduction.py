"""Full gradients to reduced shards: by differentiable collectives, or under way while backward goes on.

Both add up the same numbers in the same order, so their results are equal bitwise: packed, cast to the dtype to reduce
in, divided (if that is float16), summed over the shards, cast to the stored dtype, summed over the copies, divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .backend import Flight
from .codecs import Codec
from .collectives import psum, scatter_encoded, scatter_sums
from .homes import Home
from .layout import Buffer, Layout
from .mesh import Axis
from .pack import pack
from .precision import Travel, divide_factors


def reduced(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> Tensor:
    """The shard of the mean (or the sum) over ranks of the gradients of ``buffer``; ``None`` counts as zeros."""
    packed = pack(_complete(grads, buffer, layout), buffer)
    dtypes = _dtypes(packed, buffer, layout)
    before, after = layout.divisors(dtypes.reduced)
    packed = packed if before == 1 else packed.to(dtypes.reduced) / before
    total = scatter_sums(packed, layout.mesh[layout.shard_axis], dtypes) if buffer.num_shards > 1 else packed
    return _divided(_over_copies(total, buffer, layout, dtypes), after)


def reduced_encoded(
    grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout, codec: Codec, error: Tensor | None
) -> tuple[Tensor, Tensor]:
    """:func:`reduced` of what ``codec`` makes of ``grads`` and last time's ``error``, and what it lost of them."""
    packed = pack(_complete(grads, buffer, layout), buffer)
    wide = packed.to(torch.promote_types(packed.dtype, torch.float32))
    owed = wide if error is None else wide + error
    total, lost = scatter_encoded(owed, layout.mesh[layout.shard_axis], codec)
    dtypes = layout.travel(buffer, wide.dtype)
    before, after = layout.divisors(dtypes.reduced)
    return _divided(_over_copies(_divided(total, before), buffer, layout, dtypes), after), lost


def _divided(x: Tensor, divisor: float) -> Tensor:
    return x if divisor == 1 else x / divisor


def _over_copies(total: Tensor, buffer: Buffer, layout: Layout, dtypes: Travel) -> Tensor:
    for axis in copies(buffer, layout):
        total = psum(total.to(dtypes.reduced), axis).to(dtypes.stored)
    return total.to(dtypes.stored)


def over_replicas(shard: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    """The mean (or the sum) over replicas of what each of them has reduced for itself, added up as gradients are."""
    size = layout.axis_size(layout.replicate_axis)
    if size == 1:
        return shard
    dtypes = _dtypes(shard, buffer, layout) if shard.is_complex() else layout.travel(buffer)
    before, after = divide_factors(size, dtypes.reduced) if layout.reduction == "mean" else (1, 1)
    total = psum(_divided(shard.to(dtypes.reduced), before), layout.mesh[layout.replicate_axis])
    return _divided(total.to(dtypes.stored), after)


def copies(buffer: Buffer, layout: Layout) -> list[Axis]:
    """The axes whose ranks hold copies of a shard."""
    names = [layout.replicate_axis, *([layout.shard_axis] if buffer.num_shards == 1 else [])]
    return [layout.mesh[name] for name in names if layout.axis_size(name) > 1]


class Reductions:
    """The reductions of backward passes, started as gradients come and landed at the end of each pass.

    One part's is under way at a time: the next waits for it, and so one full gradient is let go before another is laid
    out, in the same memory. A pass that runs inside another (a hook, a reentrant checkpoint) has its own results.
    A result is put where its shard lives, of which ``homes`` tells, as soon as it has landed.
    """

    def __init__(self, homes: Mapping[str, Home] | None = None) -> None:
        self._homes = homes or {}
        self._under_way: list[tuple[int, _Reduction]] = []
        self._landed: dict[tuple[int, str], Tensor] = {}
        self._room: dict[int, Tensor] = {}

    def start(
        self, grads: Mapping[str, Tensor | None], buffers: Sequence[Buffer], layout: Layout, backward_pass: int
    ) -> None:
        self._land()
        for i, buffer in enumerate(buffers):
            self._under_way.append((backward_pass, self._start(_complete(grads, buffer, layout), buffer, layout, i)))

    def land(self, key: str, backward_pass: int) -> Tensor | None:
        """The shard of buffer ``key`` that ``backward_pass`` has reduced, once."""
        self._land()
        return self._landed.pop((backward_pass, key), None)

    def _land(self) -> None:
        while self._under_way:
            backward_pass, reduction = self._under_way.pop(0)
            key, total = reduction.buffer.key, reduction.land()
            self._landed[backward_pass, key] = self._homes.get(key, Home(total.device)).put(total)

    def _start(self, grads: Mapping[str, Tensor], buffer: Buffer, layout: Layout, place: int) -> _Reduction:
        like = grads[buffer.slots[0].name]
        dtypes = _dtypes(like, buffer, layout)
        before, _ = layout.divisors(dtypes.reduced)
        if buffer.num_shards == 1:  # nothing to add up here, and what was laid out may be the result
            packed = pack(grads, buffer)
            packed = packed if before == 1 else packed.to(dtypes.reduced).div_(before)
            return _Reduction(buffer, layout, dtypes, Flight([], lambda: packed))
        packed = pack(grads, buffer, out=self._room_for(buffer, like, dtypes.reduced, place))
        packed = packed if before == 1 else packed.div_(before)
        axis = layout.mesh[layout.shard_axis]
        axis.announce("psum_scatter", packed.numel(), packed.dtype, buffer.key)
        return _Reduction(buffer, layout, dtypes, axis.backend.start_psum_scatter(packed))

    def _room_for(self, buffer: Buffer, like: Tensor, dtype: torch.dtype, place: int) -> Tensor:
        """Memory that is written again and again: fresh pages cost as much as what is written to them."""
        room = self._room.get(place)
        if room is None or room.dtype != dtype or room.numel() < buffer.numel:
            room = self._room[place] = like.new_empty(buffer.numel, dtype=dtype)
        return room[: buffer.numel]


@dataclass(frozen=True)
class _Reduction:
    """One buffer on its way: over the shards while backward goes on, then over the copies."""

    buffer: Buffer
    layout: Layout
    dtypes: Travel
    flight: Flight

    def land(self) -> Tensor:
        total = self.flight.land().to(self.dtypes.stored)
        for axis in copies(self.buffer, self.layout):
            addend = total.to(self.dtypes.reduced)
            axis.announce("psum", addend.numel(), addend.dtype, self.buffer.key)
            total = axis.backend.psum(addend).to(self.dtypes.stored)
        _, after = self.layout.divisors(self.dtypes.reduced)
        return total if after == 1 else total.div_(after)


def _complete(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> dict[str, Any]:
    """With zeros for what is ``None``."""
    given = [grad for slot in buffer.slots if (grad := grads[slot.name]) is not None]
    like = given[0] if given else torch.zeros((), dtype=buffer.dtype, device=layout.mesh.device)
    zeros = {slot.name: like.new_zeros(slot.shape) for slot in buffer.slots if grads[slot.name] is None}
    return {**grads, **zeros}


def _dtypes(grads: Tensor, buffer: Buffer, layout: Layout) -> Travel:
    """Gradients come in the dtype that was computed in; a complex one is not cast to a real one."""
    if grads.is_complex():
        return Travel(buffer.dtype, grads.dtype, grads.dtype, buffer.dtype)
    return layout.travel(buffer, grads.dtype)
