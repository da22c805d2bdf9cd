"""Sums and maxima over ranks that return one loss together: those of an axis that DTensors are sharded over.

By ``psum`` the gradient counts every rank's use of the result, which is right where each rank returns a loss of its
own. Ranks that share a DTensor all compute the same loss, and it counts once: a sum hands its gradient on as it is, and
the transpose of that is the sum again. These axes are of real ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..communication.axis import Axis
from ..torch_internals.autograd import Function, with_outer_tangents
from .rules import winners_share

_Map = Callable[[Tensor, Axis], Tensor]


def sum_as_one_value(x: Tensor, axis: Axis) -> Tensor:
    """``psum``, of which the ranks of ``axis`` make one loss together."""
    return _Linear.apply(x, axis, _summed, _copied)


def max_as_one_value(x: Tensor, axis: Axis) -> Tensor:
    """``pmax``, of which the ranks of ``axis`` make one loss together."""
    return _Max.apply(x, axis)


def _summed(x: Tensor, axis: Axis) -> Tensor:
    return axis.issue("psum", x).wait()


def _copied(x: Tensor, axis: Axis) -> Tensor:
    """One value for each rank to use: what they do with it adds up."""
    return x.view_as(x)


class _Linear(Function):
    """``fn``, whose transpose is ``transposed``: they are each other's."""

    @staticmethod
    def forward(x: Tensor, axis: Axis, fn: _Map, transposed: _Map) -> Tensor:
        return fn(x, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.axis, ctx.fn, ctx.transposed = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Linear.apply(grad, ctx.axis, ctx.transposed, ctx.fn), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _Linear.apply(tangent, ctx.axis, ctx.fn, ctx.transposed)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, axis: Axis, fn: _Map, transposed: _Map) -> Any:
        return _Linear.apply(x, axis, fn, transposed), in_dims[0]


class _Max(Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return axis.issue("pmax", x).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.axis = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        share = winners_share(*ctx.saved_tensors, None, None, ctx.axis)
        return _Linear.apply(grad, ctx.axis, _copied, _summed) * share, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with with_outer_tangents():
            return sum_as_one_value(tangent * winners_share(*ctx.saved_tensors, None, None, ctx.axis), ctx.axis)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, axis: Axis) -> Any:
        return _Max.apply(x, axis), in_dims[0]
