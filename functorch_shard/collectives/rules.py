"""Derivative and batching rules of collectives. ``encoded`` and ``sharding.data_parallel`` have rules of their own.

Every collective is one Function in one order: forward, setup_context, backward, jvp, vmap. torch's own collectives
cannot stand below these under torch.func: there they give silent zeros (grad, jvp) or garbage (vmap). See Note [Ranks
as a batch axis] in mesh/mesh.py for the operands ``index`` and ``others``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..communication.axis import Axis
from ..torch_internals.autograd import Function, with_outer_tangents
from .operands import aside, fold, save_static, saved, stack


class Psum(Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis) -> Tensor:
        return axis.issue("psum", x).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Psum.apply(grad, *saved(ctx)), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return Psum.apply(tangent, *saved(ctx))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0])
            return Psum.apply(x, index, others, fold(axis, info, in_dims)), batch_dim
        return axis.issue("psum", stack(x, in_dims[0], axis)).wait(), None


def psum_at(x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis) -> Tensor:
    """``psum`` over ``axis`` by the operands of :func:`place_of` as they were when something else was computed."""
    return Psum.apply(x, index, others, axis)


class Pmax(Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis) -> Tensor:
        return axis.issue("pmax", x).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, *place, ctx.axis = inputs
        ctx.save_for_backward(x, output, *place)
        ctx.save_for_forward(x, output, *place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, largest, *place = ctx.saved_tensors
        share = winners_share(x, largest, *place, ctx.axis)
        return Psum.apply(grad, *place, ctx.axis) * share, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        x, largest, *place = ctx.saved_tensors
        with with_outer_tangents():
            return Psum.apply(tangent * winners_share(x, largest, *place, ctx.axis), *place, ctx.axis)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0])
            return Pmax.apply(x, index, others, fold(axis, info, in_dims)), batch_dim
        return axis.issue("pmax", stack(x, in_dims[0], axis)).wait(), None


def winners_share(x: Tensor, largest: Tensor, *place: Any) -> Tensor:
    """What part of the result's derivative belongs to this rank: 1 / (number of winners) for a winner, or 0."""
    wins = (x == largest).to(x.dtype)
    return wins / Psum.apply(wins, *place)


_TRANSPOSED = {"all_gather": "psum_scatter", "psum_scatter": "all_gather"}


class Linear(Function):
    """``all_gather`` or ``psum_scatter`` along ``dim``: each is the transpose of the other."""

    @staticmethod
    def forward(x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, dim: int, kind: str) -> Tensor:
        return axis.issue(kind, x, dim=dim).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *place, kind = saved(ctx)
        return Linear.apply(grad, *place, _TRANSPOSED[kind]), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return Linear.apply(tangent, *saved(ctx))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        index: Tensor | None,
        others: Tensor | None,
        axis: Axis,
        dim: int,
        kind: str,
    ) -> Any:
        if in_dims[1] is None:
            x, batch_dim, shift = aside(x, in_dims[0])
            return Linear.apply(x, index, others, fold(axis, info, in_dims), dim + shift, kind), batch_dim
        result = axis.issue(kind, stack(x, in_dims[0], axis), dim=dim).wait()
        return result, None if kind == "all_gather" else 0  # one value for all ranks, or one for each
