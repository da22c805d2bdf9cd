"""Full gradients to reduced shards: by differentiable collectives, or under way while backward goes on.

Both add up the same numbers in the same order, so their results are equal bitwise: packed, cast to the dtype to reduce
in, divided (if that is float16), summed over the shards, summed over the copies, divided, and cast to the stored dtype
once. Where ``fs.grad`` takes the mean, the last three of these are done at its boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual

from ..collectives.boundary import Boundary, anchors_here
from ..collectives.codecs import Codec
from ..collectives.encoded import scatter_encoded
from ..collectives.primitives import psum
from ..collectives.rules import scatter_sums
from ..communication.axis import Axis
from ..communication.work import Finished, Work
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..layout.packing import pack
from ..layout.precision import Travel, divide_factors
from ..storage.memory_kind import MemoryKind, to_memory_kind_of, to_working_device
from ..torch_internals.transforms import in_transform


def reduced(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> Tensor:
    """The shard of the mean (or the sum) over ranks of the gradients of ``buffer``; ``None`` counts as zeros.

    Not yet cast to the dtype that it is stored or returned in.
    """
    packed = pack(_complete(grads, buffer, layout), buffer)
    dtypes = _dtypes(packed, buffer, layout)
    total = _scattered(packed, buffer, layout, dtypes)
    return mean(total, copies(buffer, layout), layout.divisors(dtypes.reduced), dtypes)


def reduced_and_cast(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> Tensor:
    """:func:`reduced` in the dtype to return: the stored one, or with ``keep_low_precision_grads`` the reduction's."""
    return _returned(reduced(grads, buffer, layout), buffer, layout)


def scattered(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> Tensor:
    """The shard of the sum over the ranks that share ``buffer``: the exact transpose of an all-gather."""
    packed = pack(_complete(grads, buffer, layout), buffer)
    return _scattered(packed, buffer, layout, _dtypes(packed, buffer, layout))


def _scattered(packed: Tensor, buffer: Buffer, layout: Layout, dtypes: Travel) -> Tensor:
    if buffer.num_shards == 1:
        return packed.to(dtypes.carried)
    before, _ = layout.divisors(dtypes.reduced)
    packed = packed if before == 1 else packed.to(dtypes.reduced) / before
    return _times(scatter_sums(packed, layout.mesh[layout.shard_axis].of(buffer.key), dtypes), before)


def reduced_encoded(
    grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout, codec: Codec, error: Tensor | None
) -> tuple[Tensor, Tensor]:
    """:func:`reduced` of what ``codec`` makes of ``grads`` and last time's ``error``, and what it lost of them."""
    packed = pack(_complete(grads, buffer, layout), buffer)
    wide = packed.to(torch.promote_types(packed.dtype, torch.float32))
    owed = wide if error is None else wide + error
    total, lost = scatter_encoded(owed, layout.mesh[layout.shard_axis].of(buffer.key), codec)
    dtypes = layout.travel(buffer, wide.dtype)
    return _returned(mean(total, copies(buffer, layout), layout.divisors(dtypes.reduced), dtypes), buffer, layout), lost


def mean(total: Tensor, axes: Sequence[Axis], divisors: tuple[float, float], dtypes: Travel) -> Tensor:
    """What the copies on ``axes`` have in all, divided by ``divisors`` before and after."""
    before, after = divisors
    total = _times(total, 1 / before).to(dtypes.reduced)
    for axis in axes:
        total = psum(total, axis)
    return _divided(total.to(dtypes.carried), after)


def at_boundary(grads: Mapping[str, Any], layout: Layout, boundary: Boundary) -> dict[str, Any]:
    """Exact derivatives by the shards of all ranks, as gradients of the mean over ranks: Note [Boundary].

    Summed over copies and divided by the number of ranks. Outside of ``spmd`` all ranks return one value, and copies
    are dims. What ``boundary`` made is written over: fresh memory costs as much as the division.
    """
    if not layout.mesh.in_spmd:
        return {key: None if x is None else _sum_of_stack(x, layout.buffers[key], layout) for key, x in grads.items()}
    return {
        key: None if x is None else _mean_of_rank(x, layout.buffers[key], layout, boundary.has_made(x))
        for key, x in grads.items()
    }


def _mean_of_rank(x: Tensor, buffer: Buffer, layout: Layout, in_place: bool) -> Tensor:
    axes, dtypes = copies(buffer, layout), _dtypes_at_boundary(x, buffer, layout)
    divisors = layout.divisors(dtypes.reduced)
    if in_place and not axes and x.dtype == dtypes.returned:
        return x.div_(divisors[0] * divisors[1]) if layout.reduction == "mean" else x
    moved = to_working_device(x, layout.mesh.device) if axes else x
    average = _returned(mean(moved, axes, divisors, dtypes), buffer, layout)
    return x.copy_(average) if in_place and x.dtype == average.dtype else to_memory_kind_of(average, x)


def _sum_of_stack(x: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    for dim in copy_dims(buffer, layout):
        x = x.sum(dim, keepdim=True).expand_as(x)
    return _returned(x, buffer, layout)


def _dtypes_at_boundary(x: Tensor, buffer: Buffer, layout: Layout) -> Travel:
    return _dtypes(x, buffer, layout) if x.is_complex() else layout.travel(buffer)


def _returned(x: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    return x.to(layout.travel(buffer).returned)


def copy_dims(buffer: Buffer, layout: Layout) -> list[int]:
    """The rank dims of a stacked tree along which there are copies of a shard of ``buffer``."""
    names = enumerate(layout.mesh.axes)
    return [i for i, name in names if buffer.num_shards == 1 or name != layout.shard_axis]


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _divided(x: Tensor, divisor: float) -> Tensor:
    return x if divisor == 1 else x / divisor


def over_replicas(shard: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    """The mean (or the sum) over replicas of what each of them has reduced for itself, added up as gradients are."""
    dtypes = _dtypes(shard, buffer, layout) if shard.is_complex() else layout.travel(buffer)
    size = layout.axis_size(layout.replicate_axis)
    if size == 1:
        return _returned(shard, buffer, layout)
    divisors = divide_factors(size, dtypes.reduced) if layout.reduction == "mean" else (1, 1)
    return _returned(mean(shard, [layout.mesh[layout.replicate_axis]], divisors, dtypes), buffer, layout)


def copies(buffer: Buffer, layout: Layout) -> list[Axis]:
    """The axes whose ranks hold copies of a shard."""
    names = [layout.replicate_axis, *([layout.shard_axis] if buffer.num_shards == 1 else [])]
    return [layout.mesh[name].of(buffer.key) for name in names if layout.axis_size(name) > 1]


def is_transpose(buffer: Buffer, layout: Layout) -> bool:
    """Whether the mean (or the sum) over ranks is the transpose of a gather, for equal values of equal copies."""
    divisor = layout.num_ranks if layout.reduction == "mean" else 1
    return prod(axis.size for axis in copies(buffer, layout)) == divisor


def reduced_together(flats: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Whole buffers behind one node: backward reduces all of them or none, those that were not used as zeros.

    Inside of an outermost ``fs.grad``, on real ranks (Note [Unused units] in owed.py); elsewhere ``flats``.
    """
    anchors = anchors_here()
    keys = [key for key, x in flats.items() if x.requires_grad]
    if anchors is None or not keys or in_transform() or layout.mesh.size == 1:
        return flats
    if any(unpack_dual(x).tangent is not None for x in flats.values()):
        return flats
    anchor, *joined = _Together.apply(*(flats[key] for key in keys))
    anchors.append(anchor)
    return flats | dict(zip(keys, joined, strict=True))


class _Together(Function):
    """An anchor, and the operands themselves, which have no tangents."""

    @staticmethod
    def forward(*flats: Tensor) -> tuple[Tensor, ...]:
        return flats[0].new_empty(0), *(x.view_as(x) for x in flats)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> Any:
        return tuple(_zeros(*like) if grad is None else grad for grad, like in zip(grads, ctx.like, strict=True))


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class Reductions:
    """The reductions of backward passes, started as gradients come and waited for at the end of each pass.

    One part's is under way at a time: the next waits for it, and so one full gradient is let go before another is laid
    out, in the same memory. A pass that runs inside another (a hook, a reentrant checkpoint) has its own results.
    A result is put in the memory kind of its shard as soon as it is complete. Autograd may call from
    several threads: whoever comes while another one waits for a message waits for it too.
    """

    def __init__(self, memory_kinds: Mapping[str, MemoryKind] | None = None) -> None:
        self._memory_kinds = memory_kinds or {}
        self._one_at_a_time = RLock()
        self._under_way: list[tuple[int, _Reduction]] = []
        self._results: dict[tuple[int, str], Tensor] = {}
        self._room: dict[int, Tensor] = {}

    def start(
        self,
        grads: Mapping[str, Tensor | None],
        buffers: Sequence[Buffer],
        layout: Layout,
        backward_pass: int,
        averages: bool = True,
    ) -> None:
        """Of the mean over ranks, or else of the sum over the ranks that share a buffer."""
        with self._one_at_a_time:
            self._finish()
            for i, buffer in enumerate(buffers):
                one = self._start(_complete(grads, buffer, layout), buffer, layout, i, averages)
                self._under_way.append((backward_pass, one))

    def wait(self, key: str, backward_pass: int) -> Tensor | None:
        """The shard of buffer ``key`` that ``backward_pass`` has reduced, once."""
        with self._one_at_a_time:
            self._finish()
            return self._results.pop((backward_pass, key), None)

    def _finish(self) -> None:
        while self._under_way:
            backward_pass, reduction = self._under_way.pop(0)
            key, total = reduction.buffer.key, reduction.land()
            self._results[backward_pass, key] = self._memory_kinds.get(key, MemoryKind(total.device)).put(total)

    def _start(
        self, grads: Mapping[str, Tensor], buffer: Buffer, layout: Layout, place: int, averages: bool
    ) -> _Reduction:
        like = grads[buffer.slots[0].name]
        dtypes = _dtypes(like, buffer, layout)
        before, _ = layout.divisors(dtypes.reduced)
        if buffer.num_shards == 1:  # nothing to add up here, and what was laid out may be the result
            packed = pack(grads, buffer).to(dtypes.carried)
            return _Reduction(buffer, layout, dtypes, Finished(packed), 1, averages)
        packed = pack(grads, buffer, out=self._room_for(buffer, like, dtypes.reduced, place))
        packed = packed if before == 1 else packed.div_(before)
        axis = layout.mesh[layout.shard_axis]
        work = axis.issue("psum_scatter", packed, key=buffer.key)
        return _Reduction(buffer, layout, dtypes, work, before, averages)

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
    work: Work
    divided: float  # what the addends were divided by
    averages: bool

    def land(self) -> Tensor:
        total = self.work.wait().to(self.dtypes.carried)
        total = total if self.divided == 1 else total.mul_(self.divided)
        return self._mean(total) if self.averages else total

    def _mean(self, total: Tensor) -> Tensor:
        before, after = self.layout.divisors(self.dtypes.reduced)
        total = (total if before == 1 else total.div_(before)).to(self.dtypes.reduced)
        for axis in copies(self.buffer, self.layout):
            total = axis.issue("psum", total, key=self.buffer.key).wait()
        total = total.to(self.dtypes.carried)
        return (total if after == 1 else total.div_(after)).to(self.dtypes.stored)


def _complete(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> dict[str, Any]:
    """The gradients of ``buffer`` alone, with zeros for what is ``None``."""
    given = [grad for slot in buffer.slots if (grad := grads[slot.name]) is not None]
    like = given[0] if given else torch.zeros((), dtype=buffer.dtype, device=layout.mesh.device)
    every = {slot.name: (slot, grads[slot.name]) for slot in buffer.slots}
    return {name: like.new_zeros(slot.shape) if grad is None else grad for name, (slot, grad) in every.items()}


def _dtypes(grads: Tensor, buffer: Buffer, layout: Layout) -> Travel:
    """Gradients come in the dtype that was computed in; a complex one is not cast to a real one."""
    if grads.is_complex():
        return Travel(buffer.dtype, grads.dtype, grads.dtype, buffer.dtype)
    return layout.travel(buffer, grads.dtype)
