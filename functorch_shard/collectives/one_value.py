"""Sums and maxima over ranks that return one loss together: those of an axis that DTensors are sharded over.

By ``psum`` the gradient counts every rank's use of the result, which is right where each rank returns a loss of its
own. Ranks that share a DTensor all compute the same loss, and it counts once: a sum hands its gradient on as it is, and
the transpose of that is the sum again. These axes are of real ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from ..communication.axis import Axis
from ..torch_internals.autograd import signed
from ..torch_internals.transforms import with_outer_tangents
from .rules import winners_share


def sum_as_one_value(x: Tensor, axis: Axis) -> Tensor:
    """``psum``, of which the ranks of ``axis`` make one loss together."""
    return _Sum.apply(x, axis)


def max_as_one_value(x: Tensor, axis: Axis) -> Tensor:
    """``pmax``, of which the ranks of ``axis`` make one loss together."""
    return _Max.apply(x, axis)


class _Sum(Function):
    @staticmethod
    @signed
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return axis.issue("psum", x).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.axis = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Copied.apply(grad, ctx.axis), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _Sum.apply(tangent, ctx.axis)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, axis: Axis) -> Any:
        return _Sum.apply(x, axis), in_dims[0]


class _Copied(Function):
    """One value for each rank to use: what they do with it adds up."""

    @staticmethod
    @signed
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.axis = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Sum.apply(grad, ctx.axis), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _Copied.apply(tangent, ctx.axis)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, axis: Axis) -> Any:
        return _Copied.apply(x, axis), in_dims[0]


class _Max(Function):
    @staticmethod
    @signed
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
        return _Copied.apply(grad, ctx.axis) * share, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with with_outer_tangents():
            return _Sum.apply(tangent * winners_share(*ctx.saved_tensors, None, None, ctx.axis), ctx.axis)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, axis: Axis) -> Any:
        return _Max.apply(x, axis), in_dims[0]
