"""The parts of the data-parallel gather that move nothing: where its gradient is averaged, scaled and cast."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose, prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..communication.axis import Axis
from ..communication.simulated import in_rank_order
from ..layout.precision import Travel
from .boundary import here, takes_mean
from .operands import aside, fold, place_of, save_static, saved, stack
from .rules import psum_at


def averaged(x: Tensor, axes: Sequence[Axis], divisors: tuple[float, float], reduced: torch.dtype) -> Tensor:
    """``x``, as a value that every rank of ``axes`` holds a copy of: its gradient is the mean of theirs.

    It is divided, summed over ``axes`` in the dtype ``reduced``, and divided again, unless ``fs.grad`` takes the mean:
    Note [Boundary]. Forward mode passes the tangent through, as the copies' tangents are equal.
    """
    before, after = divisors
    places: list[Any] = [(*place_of(axis), axis) for axis in axes if axis.size > 1]
    if not places and before * after != 1:
        places = [(None, None, _Nobody())]
    last, transposes = len(places) - 1, isclose(before * after, prod(axis.size for axis in axes))
    for i in range(last, -1, -1):  # backward goes from the first to the last
        how = (before if i == 0 else 1, after if i == last else 1, reduced, transposes, i == 0)
        x = _Averaged.apply(x, *places[i], how)
    return x


class _Averaged(Function):
    @staticmethod
    def forward(
        x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis | _Rows | _Nobody, how: Any
    ) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])
        ctx.boundary, (*_, ctx.transposes, ctx.averages) = here(), inputs[4]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not takes_mean(ctx, ctx.boundary):
            return grad, None, None, None, None
        *place, axis, (before, after, reduced, *_) = saved(ctx)
        addend = (grad if before == 1 else grad / before).to(reduced)
        total = psum_at(addend, place[0], place[1], axis) if isinstance(axis, Axis) else axis.psum(addend)
        total = total.to(grad.dtype)
        return total if after == 1 else total / after, None, None, None, None

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
        axis: Axis | _Rows | _Nobody,
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


class _Nobody:
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
