"""Reductions of tangents whose primal nobody uses: a Hessian-vector product reduces each unit once.

In forward mode a function that communicates does so for the primal and for the tangent. ``curvature.hessian`` drops the
primal gradient; a node that knows this, by :func:`boundary.reduces_tangents_alone`, returns zeros for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..communication.axis import Axis
from ..torch_internals.autograd import Function
from ..torch_internals.transforms import with_outer_tangents
from .operands import place_of, save_static, saved
from .rules import psum_at

Place = tuple[Tensor | None, Tensor | None]
Linear = Callable[[Place, Sequence[Tensor | None]], Tensor]  # of the operands of ``place_of``, and of tangents


def of_tangents(
    linear: Linear, shape: Sequence[int], dtype: torch.dtype, xs: Sequence[Tensor], place: Place = (None, None)
) -> Tensor:
    """``linear`` of the tangents of ``xs`` as the tangent of zeros, of the shape and dtype that it returns."""
    return _OfTangents.apply(*place, linear, tuple(shape), dtype, *xs)


def psum_of_tangent(x: Tensor, axis: Axis) -> Tensor:
    """``psum`` of the tangent of ``x`` alone."""
    place = place_of(axis)
    return of_tangents(lambda place, xs: psum_at(_given(xs[0]), *place, axis), x.shape, x.dtype, [x], place)


def _given(x: Tensor | None) -> Tensor:
    assert x is not None, "forward mode asks for the tangent of a function of one operand if that has one"
    return x


class _OfTangents(Function):
    @staticmethod
    def forward(
        index: Tensor | None, others: Tensor | None, linear: Linear, shape: Any, dtype: torch.dtype, *xs: Tensor
    ) -> Tensor:
        return xs[0].new_zeros(shape, dtype=dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[:3])
        ctx.num_inputs = len(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None,) * ctx.num_inputs

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        *place, linear = saved(ctx)
        with with_outer_tangents():
            return linear(tuple(place), tangents[5:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, index: Any, others: Any, linear: Linear, shape: Any, dtype: Any, *xs: Any) -> Any:
        return xs[0].new_zeros((info.batch_size, *shape), dtype=dtype), 0
