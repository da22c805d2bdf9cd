"""Full gradients to reduced shards by differentiable collectives, and the mean at the boundary of ``fs.grad``.

The lazy gather reduces by ``asynchronous`` instead. Both follow the schedule of the buffer, Note [Schedule], so their
results are equal bitwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..collectives.sinks import sink_here
from ..layout.buffers import Buffer, batch_of, pack
from ..layout.layout import Layout
from ..layout.schedule import AllReduce, Divide, Schedule
from ..storage.memory_kind import to_memory_kind_of, to_working_device
from ..torch_internals.autograd import Function, has_tangents, in_transform
from .data_parallel import across, within


def reduced(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> Tensor:
    """The shard of the mean (or the sum) over ranks of the gradients of ``buffer``; ``None`` counts as zeros.

    Not yet cast to the dtype that it is stored or returned in.
    """
    packed, schedule = _packed(grads, buffer, layout)
    return across(within(packed, schedule, layout.mesh), schedule, layout.mesh)


def reduced_and_cast(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> Tensor:
    """:func:`reduced` in the dtype to return: the stored one, or with ``keep_low_precision_grads`` the reduction's."""
    return _returned(reduced(grads, buffer, layout), buffer, layout)


def scattered(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> Tensor:
    """The shard of the sum over the ranks that share ``buffer``: the exact transpose of an all-gather."""
    packed, schedule = _packed(grads, buffer, layout)
    return within(packed, schedule, layout.mesh)


def mean_at_end_of_grad(grads: Mapping[str, Tensor | None], layout: Layout) -> dict[str, Tensor | None]:
    """Exact derivatives by the shards of all ranks, as gradients of the mean over ranks: Note [Boundary]."""
    return {key: None if x is None else mean_of_shard(x, layout.buffers[key], layout) for key, x in grads.items()}


def mean_of_shard(x: Tensor, buffer: Buffer, layout: Layout, in_place: bool = False) -> Tensor:
    """The exact derivative ``x`` by a shard, summed over copies and divided by the number of ranks.

    Outside of ``spmd`` all ranks return one value, and copies are dims. ``in_place``: ``x`` may be overwritten, as
    fresh memory costs as much as the division.
    """
    if not layout.mesh.in_spmd:
        return _sum_of_stack(x, buffer, layout)
    schedule = _schedule_of_shard(x, buffer, layout)
    has_copies = any(isinstance(op, AllReduce) for op in schedule.across)
    if in_place and not has_copies and x.dtype == schedule.dtypes.returned:
        return x.div_(prod(op.by for op in schedule.across if isinstance(op, Divide))) if schedule.has_mean else x
    there = to_working_device(x, layout.mesh.device) if has_copies else x
    average = _returned(across(there, schedule, layout.mesh), buffer, layout)
    return x.copy_(average) if in_place and x.dtype == average.dtype else to_memory_kind_of(average, x)


def _sum_of_stack(x: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    for dim in copy_dims(buffer, layout):
        x = x.sum(dim, keepdim=True).expand_as(x)
    return _returned(x, buffer, layout)


def _packed(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> tuple[Tensor, Schedule]:
    """One full gradient, and how it is reduced in the dtype that it comes in."""
    packed = pack(complete(grads, buffer, layout), buffer)
    return packed, layout.schedules[buffer.key, packed.dtype]


def _schedule_of_shard(x: Tensor, buffer: Buffer, layout: Layout) -> Schedule:
    """By the unit's policy: ``x`` has the dtype that it is carried or returned in, and not that it was computed in."""
    return layout.schedules[buffer.key, x.dtype if x.is_complex() else None]


def _returned(x: Tensor, buffer: Buffer, layout: Layout) -> Tensor:
    return x.to(layout.schedules[buffer.key, None].dtypes.returned)


def copy_dims(buffer: Buffer, layout: Layout) -> list[int]:
    """The rank dims of a stacked tree along which there are copies of a shard of ``buffer``."""
    names = enumerate(layout.mesh.axes)
    return [i for i, name in names if buffer.num_shards == 1 or name not in layout.shard_axes]


def reduced_together(flats: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Whole buffers behind one node: backward reduces all of them or none, those that were not used as zeros.

    Inside of an outermost ``fs.grad``, on real ranks (Note [Unused units] in unused.py); elsewhere ``flats``.
    """
    anchors = sink_here().anchors
    keys = [key for key, x in flats.items() if x.requires_grad]
    if anchors is None or not keys or in_transform() or layout.mesh.size == 1:
        return flats
    if has_tangents([*flats.values()]):
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
        ctx.like, ctx.sink = [(x.shape, x.dtype, x.device) for x in inputs], sink_here()
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> Any:
        pairs = zip(grads, ctx.like, strict=True)
        return tuple(_constant(ctx.sink.nothing, *like) if grad is None else grad for grad, like in pairs)


def _constant(value: float, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant that takes no memory."""
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def complete(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> dict[str, Any]:
    """The gradients of ``buffer`` alone, with zeros for what is ``None``."""
    own = {slot.name: grads[slot.name] for slot in buffer.slots}
    if all(x is not None for x in own.values()):
        return own
    given = [(grad, batch_of(grad, slot)) for slot in buffer.slots if (grad := grads[slot.name]) is not None]
    like, batch = given[0] if given else (torch.zeros((), dtype=buffer.dtype, device=layout.mesh.device), ())
    every = {slot.name: (slot, grads[slot.name]) for slot in buffer.slots}
    return {
        name: like.new_zeros((*batch, *slot.shape)) if grad is None else grad for name, (slot, grad) in every.items()
    }
