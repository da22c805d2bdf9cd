"""Full gradients to reduced shards: by differentiable collectives, or under way while backward goes on.

Both add up the same numbers in the same order, so their results are equal bitwise: packed, cast to the dtype to reduce
in, summed over the shards, cast to the stored dtype, summed over the copies, divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .backend import Flight, record
from .collectives import psum, scatter_sums
from .layout import Buffer, Layout
from .mesh import Axis
from .pack import Pieces, pieces
from .precision import Travel


def reduced(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> Tensor:
    """The shard of the mean (or the sum) over ranks of the gradients of ``buffer``; ``None`` counts as zeros."""
    packed = _pieces(grads, buffer, layout).laid()
    dtypes = _dtypes(packed, buffer, layout)
    total = scatter_sums(packed, layout.mesh[layout.shard_axis], dtypes) if buffer.num_shards > 1 else packed
    for axis in copies(buffer, layout):
        total = psum(total.to(dtypes.reduced), axis)
    divisor = _divisor(layout)
    return total.to(dtypes.stored) if divisor == 1 else total.to(dtypes.stored) / divisor


def copies(buffer: Buffer, layout: Layout) -> list[Axis]:
    """The axes whose ranks hold copies of a shard."""
    names = [layout.replicate_axis, *([layout.shard_axis] if buffer.num_shards == 1 else [])]
    return [layout.mesh[name] for name in names if layout.axis_size(name) > 1]


@dataclass
class Reductions:
    """The reductions of one backward pass at a time, started as gradients come and landed at its end.

    One unit's is under way at a time: the next waits for it, and so a full gradient is let go before another is packed.
    """

    _backward_pass: int | None = None
    _under_way: list[_Reduction] = field(default_factory=list)
    _landed: dict[str, Tensor] = field(default_factory=dict)

    def start(self, grads: Mapping[str, Tensor], buffers: Sequence[Buffer], layout: Layout, backward_pass: int) -> None:
        if backward_pass != self._backward_pass:  # the last one may have been stopped by an exception
            self._land()
            self._landed, self._backward_pass = {}, backward_pass
        self._land()
        self._under_way = [_Reduction.start(_pieces(grads, buffer, layout), buffer, layout) for buffer in buffers]

    def land(self, backward_pass: int) -> dict[str, Tensor]:
        """The shards that ``backward_pass`` has reduced, by key of their buffer."""
        if backward_pass != self._backward_pass:
            return {}
        self._land()
        landed, self._landed, self._backward_pass = self._landed, {}, None
        return landed

    def _land(self) -> None:
        while self._under_way:
            reduction = self._under_way.pop(0)
            self._landed[reduction.key] = reduction.land()


@dataclass
class _Reduction:
    """One buffer on its way: over the shards while backward goes on, then over the copies."""

    key: str
    flight: Flight
    dtypes: Travel
    axes: list[Axis]
    layout: Layout

    @staticmethod
    def start(grads: Pieces, buffer: Buffer, layout: Layout) -> _Reduction:
        dtypes, axes = _dtypes(grads.parts[0][1], buffer, layout), copies(buffer, layout)
        grads = grads.to(dtypes.reduced)
        if buffer.num_shards > 1:
            axis: Any = layout.mesh[layout.shard_axis]
            record("psum_scatter", axis.name, grads.numel, dtypes.reduced)
            flight = axis.backend.start_psum_scatter(grads)
        else:
            flight = Flight([], grads.laid)
        return _Reduction(buffer.key, flight, dtypes, axes, layout)

    def land(self) -> Tensor:
        total = self.flight.land().to(self.dtypes.stored)
        for axis in self.axes:
            addend = total.to(self.dtypes.reduced)
            record("psum", axis.name, addend.numel(), addend.dtype)
            total = axis.backend.psum(addend)
        total = total.to(self.dtypes.stored)
        return total if _divisor(self.layout) == 1 else total.div_(_divisor(self.layout))


def _pieces(grads: Mapping[str, Any], buffer: Buffer, layout: Layout) -> Pieces:
    given = [grads[slot.name] for slot in buffer.slots if grads[slot.name] is not None]
    like = given[0] if given else torch.zeros((), dtype=buffer.dtype, device=layout.mesh.device)
    zeros = {slot.name: like.new_zeros(slot.shape) for slot in buffer.slots if grads[slot.name] is None}
    return pieces({**grads, **zeros}, buffer)


def _dtypes(grads: Tensor, buffer: Buffer, layout: Layout) -> Travel:
    """Gradients come in the dtype that was computed in."""
    return Travel(buffer.dtype, grads.dtype, layout.precision.reduce_dtype or grads.dtype)


def _divisor(layout: Layout) -> int:
    return layout.num_ranks if layout.reduction == "mean" else 1
