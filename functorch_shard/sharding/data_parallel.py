"""Differentiable gathers and reductions, by the schedule of each buffer; ``scatter_grads`` and ``accumulate``.

Note [Schedule] in layout/schedule.py has the operations. ``gather`` and ``within`` are each other's transpose: one
Function applies either, and its backward applies the other. ``across`` is not a transpose: it is where the mean
over ranks is taken, unless ``fs.grad`` takes it, Note [Boundary]. The lazy gather reduces by ``reduction`` instead; the
results are equal bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..collectives.primitives import psum
from ..collectives.rules import Linear, LinearMap, aside, fold, place_of, save_static, saved, stack
from ..collectives.sinks import prepare
from ..communication.backend import Axis
from ..communication.collective import sum_in_rank_order
from ..errors import first_difference
from ..layout.buffers import Buffer, batch_of, pack
from ..layout.layout import Layout, lines_of
from ..layout.schedule import (
    AllGather,
    Cast,
    Communication,
    Divide,
    Encoding,
    Ops,
    Schedule,
    gathered_encoded,
)
from ..layout.trees import Full, Sharded, check_layout, map_items
from ..layout.validation import check_grads
from ..mesh.mesh import Mesh
from ..storage.memory_kind import to_memory_kind_of, to_working_device
from ..torch_internals.autograd import Function, eager
from .shard import copy_dims

Tree = TypeVar("Tree", Full, Sharded)


def run(
    ops: Ops,
    x: Tensor,
    communicate: Callable[[Any, Tensor], Tensor],
    divide: Callable[[Tensor, float], Tensor] = torch.div,
) -> Tensor:
    """``x`` after ``ops``; every interpreter is this fold with its own way to ``communicate``."""
    for op in ops:
        if isinstance(op, Cast):
            x = x.to(op.dtype)
        elif isinstance(op, Divide):
            x = divide(x, op.by)
        else:
            x = communicate(op, x)
    return x


def no_communication(op: Communication, x: Tensor) -> Tensor:
    raise AssertionError(op)


def gathered(x: Tensor, schedule: Schedule, mesh: Mesh, codec: Encoding | None = None) -> Tensor:
    """The whole buffer of the shards ``x``, through ``codec`` if one is given; the derivative is that without it."""
    ops = gathered_encoded(schedule.gather, schedule.dtypes, codec) if codec else schedule.gather
    return _linear(x, ops, (schedule.gather, schedule.within), schedule, mesh)


def within(x: Tensor, schedule: Schedule, mesh: Mesh) -> Tensor:
    """The shard of the sum of the full gradients ``x`` over the ranks that share the buffer."""
    return _linear(x, schedule.within, (schedule.within, schedule.gather), schedule, mesh)


def across(x: Tensor, schedule: Schedule, mesh: Mesh) -> Tensor:
    """The mean over all ranks (or the sum) of what ``within`` returned."""
    return run(schedule.across, x, lambda op, x: psum(x, mesh[op.axis].of(schedule.key)))


def _linear(x: Tensor, ops: Ops, derivative: tuple[Ops, Ops], schedule: Schedule, mesh: Mesh) -> Tensor:
    if schedule.shard_axis is None:
        return run(ops, x, no_communication)
    axis = mesh[schedule.shard_axis].of(schedule.key)
    return Linear.apply(x, *place_of(axis), _Map(axis, ops, *derivative, is_scattered=ops is schedule.within))


@dataclass(frozen=True, eq=False)
class _Map:
    """``ops``, one of which communicates over ``axis``, and those of the tangent and of the cotangent.

    Ranks are laid side by side in the last dim, behind any batch dims.
    """

    axis: Axis
    ops: Ops
    tangent: Ops
    cotangent: Ops
    is_scattered: bool

    @property
    def derivative(self) -> _Map:
        return replace(self, ops=self.tangent)

    @property
    def transpose(self) -> _Map:
        return _Map(self.axis, self.cotangent, self.cotangent, self.tangent, not self.is_scattered)

    def __call__(self, x: Tensor, ndim: int) -> Tensor:
        return run(self.ops, x, lambda op, x: _communicate(op, x, self.axis, ndim - 1))


def _communicate(op: Communication, x: Tensor, axis: Axis, dim: int) -> Tensor:
    if not isinstance(op, AllGather):
        return axis.issue("psum_scatter", x, dim=dim).wait()
    if op.codec is None:
        return axis.issue("all_gather", x, dim=dim).wait().contiguous()
    messages, form = op.codec.encode(x)
    rows = axis.issue("all_gather", messages, dim=dim).wait().unflatten(-1, (axis.size, messages.shape[-1]))
    return op.codec.decode(rows, form).flatten(-2)


def averaged(x: Tensor, schedule: Schedule, mesh: Mesh) -> Tensor:
    """``x``, as a value that ranks hold copies of: its gradient is the mean of theirs, by ``schedule.across``.

    Unless ``fs.grad`` takes the mean: Note [Boundary]. The gradient comes in the dtype that sums are carried in, if
    ``x`` can have one of that dtype. Forward mode passes the tangent through, as the copies' tangents are equal.
    """
    pieces = schedule.pieces
    if not pieces and x.dtype != schedule.dtypes.carried:
        pieces = (((), None),)
    for i, (ops, op) in reversed([*enumerate(pieces)]):  # backward goes from the first to the last
        axis = None if op is None else mesh[op.axis].of(schedule.key)
        place = (None, None) if axis is None else place_of(axis)
        takes = i == 0 and schedule.has_mean
        x = _Averaged.apply(x, *place, _Mean(axis, ops, schedule.dtypes.carried, schedule.mean_is_transpose, takes))
    return x


@dataclass(frozen=True, eq=False)
class _Mean:
    """``ops`` over ``axis`` of a gradient in the dtype that sums are ``carried`` in; one object as :class:`_Map` is."""

    axis: Axis | _Rows | None
    ops: Ops
    carried: torch.dtype
    is_transpose: bool
    averages: bool  # the one of several that takes the mean

    def __call__(self, grad: Tensor, index: Tensor | None, others: Tensor | None) -> Tensor:
        return run(self.ops, grad, lambda op, x: self._psum(x, index, others)).to(self.carried)

    def _psum(self, x: Tensor, index: Tensor | None, others: Tensor | None) -> Tensor:
        assert self.axis is not None, self.ops
        if isinstance(self.axis, _Rows):
            return self.axis.psum(x)
        return Linear.apply(x, index, others, LinearMap(self.axis))


class _Averaged(Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor | None, others: Tensor | None, mean: _Mean) -> Tensor:
        return x.view_as(x) if x.dtype == mean.carried else x.to(mean.carried)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])
        prepare(ctx, inputs[3].averages, inputs[3].is_transpose)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *place, mean = saved(ctx)
        if mean.ops:
            averages, (grad,) = ctx.sink.start(ctx, [grad])
            grad = mean(grad, *place) if averages else grad
        return grad, None, None, None  # autograd casts it to the dtype of x, unless x.grad_dtype is None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _Averaged.apply(tangent, *saved(ctx))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, mean: _Mean) -> Any:
        if in_dims[1] is None:
            x, batch_dim = aside(x, in_dims[0], -1)  # rows, where there are any, stay in dim 0
            folded = replace(mean, axis=fold(mean.axis, info, in_dims))
            return _Averaged.apply(x, index, others, folded), batch_dim
        assert isinstance(mean.axis, Axis)
        return _Averaged.apply(stack(x, in_dims[0], mean.axis), None, None, replace(mean, axis=_Rows())), 0


class _Rows:
    """The ranks of a simulated axis once they are the rows of a tensor: what is left of an axis outside its level."""

    def psum(self, x: Tensor) -> Tensor:
        return sum_in_rank_order(x.unbind(0)).expand_as(x)


def scattered(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout, mean: bool = False) -> Tensor:
    """The shard of the sum over the ranks that share ``buffer``: the exact transpose of an all-gather.

    With ``mean`` of the mean (or the sum) over all ranks, not yet in the dtype that it is stored or returned in.
    ``None`` counts as zeros.
    """
    packed = pack(complete(grads, buffer, layout), buffer)
    schedule = layout.schedules[buffer.key, packed.dtype]
    total = within(packed, schedule, layout.mesh)
    return across(total, schedule, layout.mesh) if mean else total


def reduced_and_cast(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> Tensor:
    """The mean in the dtype to return: the stored one, or with ``keep_low_precision_grads`` the reduction's."""
    return scattered(grads, buffer, layout, mean=True).to(layout.schedules[buffer.key, None].dtypes.returned)


def mean_at_end_of_grad(grads: Mapping[str, Tensor | None], layout: Layout) -> dict[str, Tensor | None]:
    """Exact derivatives by the shards of all ranks, as gradients of the mean over ranks: Note [Boundary]."""
    return {key: None if x is None else mean_of_shard(x, layout.buffers[key], layout) for key, x in grads.items()}


def mean_of_shard(x: Tensor, buffer: Buffer, layout: Layout, in_place: bool = False) -> Tensor:
    """The exact derivative ``x`` by a shard, summed over copies and divided by the number of ranks.

    Outside of ``spmd`` all ranks return one value, and copies are dims. ``in_place``: a reduction made ``x``, which is
    overwritten, as fresh memory costs as much as the division.
    """
    # by the unit's policy: x has the dtype that it is carried or returned in, and not that it was computed in
    schedule = layout.schedules[buffer.key, x.dtype if x.is_complex() else None]
    returned = layout.schedules[buffer.key, None].dtypes.returned
    if in_place and not schedule.has_copies and x.dtype == returned:
        return x.div_(schedule.divisor) if schedule.has_mean else x
    if not layout.mesh.in_spmd:
        for dim in copy_dims(buffer, layout):
            x = x.sum(dim, keepdim=True).expand_as(x)
        return x.to(returned)
    there = to_working_device(x, layout.mesh.device) if schedule.has_copies else x
    average = across(there, schedule, layout.mesh).to(returned)
    return x.copy_(average) if in_place and x.dtype == returned else to_memory_kind_of(average, x)


def complete(grads: Mapping[str, Tensor | None], buffer: Buffer, layout: Layout) -> dict[str, Tensor]:
    """The gradients of ``buffer`` alone, with zeros for what is ``None``."""
    given = [(grad, batch_of(grad, slot)) for slot in buffer.slots if (grad := grads[slot.name]) is not None]
    like, batch = given[0] if given else (torch.zeros((), dtype=buffer.dtype, device=layout.mesh.device), ())
    return {
        slot.name: like.new_zeros((*batch, *slot.shape)) if (grad := grads[slot.name]) is None else grad
        for slot in buffer.slots
    }


@eager
def scatter_grads(grads: Mapping[str, Any], layout: Layout | None = None) -> Sharded:
    """Full gradients to reduced, sharded ones: the mean over ranks (or the sum), each rank keeping its part.

    What the gradient of :func:`gather` does, called by hand: ``scatter_grads(torch.func.grad(f)(gather(params)))``
    equals ``torch.func.grad(lambda params: f(gather(params)))(params)``. To accumulate over microbatches without
    communication (FSDP's ``no_sync``), add full gradients and scatter once. Linear, and differentiable.

    Args:
        grads: a ``Full``, or a mapping name -> tensor with ``layout``: this rank's gradients, in shapes of the
            parameters and any floating-point dtype. ``None`` counts as zeros. Frozen parameters may be left out. Those
            of DTensors are DTensors, in any placements.
        layout: the layout of the result; a ``Full`` brings its own.

    Returns:
        A ``Sharded`` of gradients in the stored dtypes (with ``keep_low_precision_grads`` in those of the reduction),
        with exact zeros for padding, and ``None`` for buffers that are not trainable. Outside ``spmd``, ``grads`` of
        simulated ranks carry their rank dims, and so does the result.

    Raises:
        TypeError: ``grads`` is already sharded, a plain mapping comes without a layout, or ``layout`` is not one.
        ValueError: names, shapes or dtypes that do not fit; all of them at once.

    Cost:
        One reduce-scatter per trainable buffer, and one all-reduce of the shard where there are replicas. A gradient in
        other placements than its DTensor's is redistributed first.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, mesh)
        >>> rows = torch.tensor([[1.0, 1.0, 1.0], [3.0, 3.0, 5.0]])   # row r = rank r's gradient
        >>> mesh.spmd(lambda g: scatter_grads({"fc.w": g}, layout))(rows)["fc"]
        tensor([[2., 2.],
                [3., 0.]])
    """
    layout = layout_of_grads("scatter_grads", grads, layout)
    check_grads(grads, layout)
    if not layout.mesh.in_spmd:
        return layout.mesh.spmd(lambda grads: scatter_grads(grads, layout))(dict(grads))
    parts = near_grads(grads, layout)
    return Sharded(
        {key: reduced_and_cast(parts, b, layout) if b.trainable else None for key, b in layout.buffers.items()}, layout
    )


def near_grads(grads: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The local parts of full gradients, where they can be reduced."""
    device = layout.mesh.device
    if layout.tensor_meshes:
        from ..tensor_parallel import local_grads

        grads = local_grads(grads, layout)
    return {name: to_working_device(x, device) if isinstance(x, Tensor) else x for name, x in grads.items()}


def layout_of_grads(verb: str, grads: Any, layout: Layout | None) -> Layout:
    """The layout that full gradients are to be scattered by."""
    if isinstance(grads, Sharded):
        raise TypeError(f"{verb}: got a Sharded, expected full gradients; these are sharded already.")
    layout = layout or (grads.layout if isinstance(grads, Full) else None)
    if layout is None or not isinstance(grads, Mapping):
        raise TypeError(f"{verb}: got {type(grads).__name__}, expected a Full, or a mapping and a layout.")
    check_layout(verb, layout)
    return layout


@eager
def accumulate(total: Tree | None, grads: Tree) -> Tree:
    """``total + grads``: gradients of microbatches, added up.

    Full gradients are added up in the dtype that they are reduced in. ``scatter_grads`` of the sum reduces once, and
    communicates nothing before that: FSDP's ``no_sync``. Sharded gradients are reduced already, each microbatch by
    itself, and take the memory of one shard.

    Args:
        total: the sum so far; ``None`` before the first microbatch.
        grads: of a microbatch, as ``fs.grad`` returns them: a ``Full`` of a function of a ``Full``, or a ``Sharded``.

    Returns:
        A new ``Full`` in each unit's ``reduce_dtype``, or as ``grads`` come; or a new ``Sharded`` in the dtypes of
        ``grads``. ``None`` counts as zeros.

    Raises:
        TypeError: ``grads`` is neither a ``Full`` nor a ``Sharded``, or ``total`` is not of the class of ``grads``.
        ValueError: sharded gradients have another layout than their ``total``.

    Cost:
        No collectives; the memory of one set of full gradients in that dtype, or of sharded ones.

    Example:
        >>> bf16 = fs.MixedPrecision(torch.bfloat16, torch.float32)
        >>> layout = fs.plan({"w": torch.zeros(1)}, fs.simulated_mesh(2), precision=bf16)
        >>> small, large = (fs.Full({"w": torch.full((1,), x, dtype=torch.bfloat16)}, layout) for x in (1.0, 256.0))
        >>> accumulate(accumulate(None, large), small)["w"]    # 256 in bfloat16
        tensor([257.])
    """
    if not isinstance(grads, (Full, Sharded)):
        raise TypeError(f"accumulate: grads: got {type(grads).__name__}, expected a Full or a Sharded of gradients.")
    if total is None:
        total = type(grads)(dict.fromkeys(grads), grads.layout)
    if type(total) is not type(grads):
        raise TypeError(f"accumulate: total: got {type(total).__name__}, but grads is a {type(grads).__name__}.")
    if isinstance(grads, Sharded) and total.layout != grads.layout:  # full gradients are by name in any layout
        mine, theirs = first_difference(lines_of(total.layout), lines_of(grads.layout)) or ("", "")
        raise ValueError(f"accumulate: total and grads have different layouts: {mine} and {theirs}")
    return map_items(lambda name, x: _add(total[name], x, _sum_dtype(name, x, grads)), grads)


def _add(total: Tensor | None, x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if x is None:
        return total
    return x.to(dtype, copy=True) if total is None else total + x.to(total.device, dtype)


def _sum_dtype(name: str, grad: Tensor | None, grads: Full | Sharded) -> torch.dtype | None:
    if grad is None or not grad.is_floating_point() or isinstance(grads, Sharded):
        return None if grad is None else grad.dtype
    layout = grads.layout
    return layout.schedules[layout.key_of[name], grad.dtype].dtypes.reduced
