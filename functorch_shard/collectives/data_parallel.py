"""The differentiable interpreter of a schedule: how ``gather`` and the reduction of gradients are differentiated.

Note [Schedule] in layout/schedule.py has the operations. ``gather`` and ``within`` are each other's transpose: one
Function applies either, and its backward applies the other. ``across`` is not a transpose: it is where the mean
over ranks is taken, unless ``fs.grad`` takes it, Note [Boundary].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..communication.axis import Axis
from ..communication.simulated import in_rank_order
from ..layout.schedule import (
    Cast,
    Divide,
    Ops,
    Schedule,
    gathered_encoded,
    up_to_communication,
)
from ..mesh.mesh import Mesh
from .boundary import here, takes_mean
from .codecs import Codec
from .operands import aside, fold, place_of, save_static, saved, stack
from .primitives import psum
from .rules import psum_at


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


def gathered(x: Tensor, plan: Schedule, mesh: Mesh, codec: Codec | None = None) -> Tensor:
    """The whole buffer of the shards ``x``, through ``codec`` if one is given; the derivative is that without it."""
    ops = gathered_encoded(plan.gather, plan.dtypes, codec) if codec else plan.gather
    return _linear(x, ops, (plan.gather, plan.within), plan, mesh)


def within(x: Tensor, plan: Schedule, mesh: Mesh) -> Tensor:
    """The shard of the sum of the full gradients ``x`` over the ranks that share the buffer."""
    return _linear(x, plan.within, (plan.within, plan.gather), plan, mesh)


def across(x: Tensor, plan: Schedule, mesh: Mesh) -> Tensor:
    """The mean over all ranks (or the sum) of what ``within`` returned."""
    return run(plan.across, x, lambda op, x: psum(x, mesh[op.axis].of(plan.key)))


def _linear(x: Tensor, ops: Ops, derivative: tuple[Ops, Ops], plan: Schedule, mesh: Mesh) -> Tensor:
    _, op, _ = up_to_communication(ops)
    if op is None:
        return run(ops, x, no_communication)
    axis = mesh[op.axis].of(plan.key)
    return _Linear.apply(x, *place_of(axis), axis, ops, derivative)


class _Linear(Function):
    """``ops``, one of which communicates; ``derivative`` are those of the tangent and those of the cotangent.

    Ranks are laid side by side in the last dim, behind any batch dims.
    """

    before, after = divisors
    places: list[Any] = [(*place_of(axis), axis) for axis in axes if axis.size > 1]
    if not places and before * after != 1:
        places = [(None, None, _NoRanks())]
    last, transposes = len(places) - 1, isclose(before * after, prod(axis.size for axis in axes))
    for i in range(last, -1, -1):  # backward goes from the first to the last
        how = (before if i == 0 else 1, after if i == last else 1, reduced, transposes, i == 0)
        x = _Averaged.apply(x, *places[i], how)
    return x


class _Averaged(Function):
    @staticmethod
    def forward(
        x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis | _Rows | _NoRanks, how: Any
    ) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])
        ctx.boundary, (*_, ctx.transposes, ctx.averages) = here(), inputs[4]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *place, axis, (ops, carried, *_) = saved(ctx)
        if not ops or not takes_mean(ctx, ctx.boundary):
            return grad, None, None, None, None  # autograd casts it to the dtype of x, unless x.grad_dtype is None
        psum = axis.psum if isinstance(axis, _Rows) else partial(psum_at, index=place[0], others=place[1], axis=axis)
        return run(ops, grad, lambda op, x: psum(x)).to(carried), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _Averaged.apply(tangent, *saved(ctx))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        index: Tensor | None,
        others: Tensor | None,
        axis: Axis | _Rows | _NoRanks,
        how: Any,
    ) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0], -1)  # rows, where there are any, stay in dim 0
            return _Averaged.apply(x, index, others, fold(axis, info, in_dims), how), batch_dim
        assert isinstance(axis, Axis)
        return _Averaged.apply(stack(x, in_dims[0], axis), None, None, _Rows(), how), 0


class _Rows:
    """The ranks of a simulated axis once they are the rows of a tensor: what is left of an axis outside its level."""

    def psum(self, x: Tensor) -> Tensor:
        return in_rank_order(x.unbind(0)).expand_as(x)


class _NoRanks:
    """No ranks to sum over."""

    def psum(self, x: Tensor) -> Tensor:
        return x


def carried(x: Tensor, dtypes: Travel) -> Tensor:
    """``x``, whose gradient comes in the dtype that sums are carried in, if ``x`` can have one of that dtype."""
    return x if x.dtype == dtypes.carried else _Carried.apply(x, dtypes.carried)


class _Carried(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.dtype = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None  # autograd casts it to the dtype of x, unless x.grad_dtype allows others

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return tangent.to(ctx.dtype)


def scaled_gradient(x: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """``x``, whose gradient has the values of ``dtype``, times ``factor``."""
    return x if factor == 1 else _ScaledGradient.apply(x, factor, dtype)


class _ScaledGradient(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, *ctx.static = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        factor, dtype = ctx.static
        return grad.to(dtype).to(grad.dtype) * factor, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _ScaledGradient.apply(tangent, *ctx.static)
