"""The differentiable interpreter of a schedule: how ``gather`` and the reduction of gradients are differentiated.

Note [Schedule] in layout/schedule.py has the operations. ``gather`` and ``within`` are each other's transpose: one
Function applies either, and its backward applies the other. ``across`` is not a transpose: it is where the mean
over ranks is taken, unless ``fs.grad`` takes it, Note [Boundary].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..collectives.primitives import psum
from ..collectives.rules import Linear, LinearMap, aside, fold, place_of, save_static, saved, stack
from ..collectives.sinks import prepare
from ..communication.axis import Axis
from ..communication.simulated import sum_in_rank_order
from ..layout.schedule import (
    AllGather,
    Cast,
    Communication,
    Divide,
    Encoding,
    Ops,
    Schedule,
    gathered_encoded,
    one_communication_each,
    up_to_communication,
)
from ..mesh.mesh import Mesh
from ..torch_internals.autograd import Function


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
    _, op, _ = up_to_communication(ops)
    if op is None:
        return run(ops, x, no_communication)
    axis = mesh[op.axis].of(schedule.key)
    return Linear.apply(x, *place_of(axis), _Map(axis, ops, *derivative))


@dataclass(frozen=True, eq=False)
class _Map:
    """``ops``, one of which communicates over ``axis``, and those of the tangent and of the cotangent.

    Ranks are laid side by side in the last dim, behind any batch dims.
    """

    axis: Axis
    ops: Ops
    tangent: Ops
    cotangent: Ops

    @property
    def derivative(self) -> _Map:
        return replace(self, ops=self.tangent)

    @property
    def transpose(self) -> _Map:
        return _Map(self.axis, self.cotangent, self.cotangent, self.tangent)

    @property
    def is_scattered(self) -> bool:
        return not any(isinstance(op, AllGather) for op in self.ops)

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


def no_communication(op: Communication, x: Tensor) -> Tensor:
    raise AssertionError(op)


def averaged(x: Tensor, schedule: Schedule, mesh: Mesh) -> Tensor:
    """``x``, as a value that ranks hold copies of: its gradient is the mean of theirs, by ``schedule.across``.

    Unless ``fs.grad`` takes the mean: Note [Boundary]. The gradient comes in the dtype that sums are carried in, if
    ``x`` can have one of that dtype. Forward mode passes the tangent through, as the copies' tangents are equal.
    """
    pieces: list[Ops] = one_communication_each(schedule.across) if schedule.has_mean else []
    if not pieces and x.dtype != schedule.dtypes.carried:
        pieces = [()]
    for i, ops in reversed([*enumerate(pieces)]):  # backward goes from the first to the last
        _, op, _ = up_to_communication(ops)
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
        return (
            self.axis.psum(x) if isinstance(self.axis, _Rows) else Linear.apply(x, index, others, LinearMap(self.axis))
        )


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
