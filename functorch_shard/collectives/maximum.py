"""The maximum of the values of all ranks; sums and maxima of real ranks that compute one loss together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..communication.backend import Axis
from ..torch_internals.autograd import Function, with_outer_tangents
from .rules import COPY, Linear, LinearMap, aside, fold, saved, stack


class Maximum(Function):
    """The largest value over the ranks of ``total.axis``; ``total`` adds up the cotangents of its copies."""

    @staticmethod
    def forward(x: Tensor, index: Tensor | None, others: Tensor | None, total: LinearMap) -> Tensor:
        return total.axis.issue("pmax", x).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, *place, total = inputs
        ctx.static = [total]
        ctx.save_for_backward(x, output, *place)
        ctx.save_for_forward(x, output, *place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, largest, *place, total = saved(ctx)
        return Linear.apply(grad, *place, total.transpose) * _share(x, largest, place, total), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        x, largest, *place, total = saved(ctx)
        with with_outer_tangents():
            return Linear.apply(tangent * _share(x, largest, place, total), *place, total)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, total: LinearMap) -> Any:
        if in_dims[1] is None:
            x, batch_dim = aside(x, in_dims[0])
            return Maximum.apply(x, index, others, replace(total, axis=fold(total.axis, info, in_dims))), batch_dim
        return total.axis.issue("pmax", stack(x, in_dims[0], info.batch_size)).wait(), None


def _share(x: Tensor, largest: Tensor, place: Any, total: LinearMap) -> Tensor:
    """What part of the result's derivative belongs to this rank: 1 / (number of winners) for a winner, or 0."""
    wins = (x == largest).to(x.dtype)
    return wins / Linear.apply(wins, *place, LinearMap(total.axis))


def shared_sum(x: Tensor, axis: Axis) -> Tensor:
    """``psum`` over real ranks that compute one loss together, as those that share a DTensor do.

    By ``psum`` the gradient counts every rank's use of the result, which is right where each rank returns a loss of its
    own. A loss that is the same on all ranks counts once: the sum hands its gradient on unchanged.
    """
    return Linear.apply(x, None, None, LinearMap(axis, transposed=COPY))


def shared_max(x: Tensor, axis: Axis) -> Tensor:
    """``pmax`` over real ranks that compute one loss together."""
    return Maximum.apply(x, None, None, LinearMap(axis, transposed=COPY))
