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

from ..collectives.boundary import here, prepare, reduces_tangents_alone, takes_mean
from ..collectives.codecs import Codec, decode_rows, encode_rows
from ..collectives.operands import aside, fold, place_of, save_static, saved, stack
from ..collectives.primitives import psum
from ..collectives.rules import psum_at
from ..collectives.tangents_alone import of_tangents, psum_of_tangent
from ..communication.axis import Axis
from ..communication.simulated import sum_in_rank_order
from ..layout.schedule import (
    AllGather,
    Cast,
    Communication,
    Divide,
    Ops,
    ReduceScatter,
    Schedule,
    gathered_encoded,
    one_communication_each,
    up_to_communication,
)
from ..mesh.mesh import Mesh
from ..torch_internals.autograd import signed


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


def across(x: Tensor, plan: Schedule, mesh: Mesh, tangents_alone: bool = False) -> Tensor:
    """The mean over all ranks (or the sum) of what ``within`` returned; or of its tangent, with a primal of zeros."""
    over = psum_of_tangent if tangents_alone else psum
    return run(plan.across, x, lambda op, x: over(x, mesh[op.axis].of(plan.key)))


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

    @staticmethod
    @signed
    def forward(
        x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, ops: Ops, derivative: tuple[Ops, Ops]
    ) -> Tensor:
        return run(ops, x, lambda op, x: _communicate(op, x, axis, x.ndim - 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])
        ctx.boundary = here()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *place, axis, _, (ops, transposed) = saved(ctx)
        if any(isinstance(op, ReduceScatter) for op in transposed) and reduces_tangents_alone(ctx):
            return _of_tangent(grad, tuple(place), axis, transposed, ops), None, None, None, None, None
        return _Linear.apply(grad, *place, axis, transposed, (transposed, ops)), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        *place, axis, _, derivative = saved(ctx)
        return _Linear.apply(tangent, *place, axis, derivative[0], derivative)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        index: Tensor | None,
        others: Tensor | None,
        axis: Axis,
        ops: Ops,
        derivative: tuple[Ops, Ops],
    ) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0])
            return _Linear.apply(x, index, others, fold(axis, info, in_dims), ops, derivative), batch_dim
        whole = any(isinstance(op, AllGather) for op in ops)  # one value for all ranks
        x = stack(x, in_dims[0], axis)
        return run(ops, x, lambda op, x: _communicate(op, x, axis, x.ndim - 2)), None if whole else 0


def _of_tangent(grad: Tensor, place: Any, axis: Axis, ops: Ops, transposed: Ops) -> Tensor:
    """What ``ops``, which reduce and scatter, make of the tangent of ``grad``."""
    *_, dtype = (op.dtype for op in ops if isinstance(op, Cast))
    shape = *grad.shape[:-1], grad.shape[-1] // axis.size
    return of_tangents(
        lambda place, xs: _Linear.apply(xs[0], *place, axis, ops, (ops, transposed)), shape, dtype, [grad], place
    )


def _communicate(op: Communication, x: Tensor, axis: Axis, dim: int) -> Tensor:
    if not isinstance(op, AllGather):
        return axis.issue("psum_scatter", x, dim=dim).wait()
    if op.codec is None:
        return axis.issue("all_gather", x, dim=dim).wait()
    messages, form = encode_rows(x, op.codec)
    rows = axis.issue("all_gather", messages, dim=dim).wait().unflatten(-1, (axis.size, messages.shape[-1]))
    return decode_rows(rows, form, op.codec).flatten(-2)


def no_communication(op: Communication, x: Tensor) -> Tensor:
    raise AssertionError(op)


def averaged(x: Tensor, plan: Schedule, mesh: Mesh) -> Tensor:
    """``x``, as a value that ranks hold copies of: its gradient is the mean of theirs, by ``plan.across``.

    Unless ``fs.grad`` takes the mean: Note [Boundary]. The gradient comes in the dtype that sums are carried in, if
    ``x`` can have one of that dtype. Forward mode passes the tangent through, as the copies' tangents are equal.
    """
    pieces: list[Ops] = one_communication_each(plan.across) if plan.has_mean else []
    if not pieces and x.dtype != plan.dtypes.carried:
        pieces = [()]
    for i, ops in reversed([*enumerate(pieces)]):  # backward goes from the first to the last
        _, op, _ = up_to_communication(ops)
        axis = None if op is None else mesh[op.axis].of(plan.key)
        place = (None, None, None) if axis is None else (*place_of(axis), axis)
        x = _Averaged.apply(x, *place, (ops, plan.dtypes.carried, plan.mean_is_transpose, i == 0 and plan.has_mean))
    return x


class _Averaged(Function):
    @staticmethod
    @signed
    def forward(x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis | _Rows | None, how: Any) -> Tensor:
        _, carried, *_ = how
        return x.view_as(x) if x.dtype == carried else x.to(carried)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])
        *_, transposes, ctx.averages = inputs[4]
        ctx.hands_on = True
        prepare(ctx, transposes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *place, axis, (ops, carried, *_) = saved(ctx)
        if not ops or not takes_mean(ctx):
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
        axis: Axis | _Rows | None,
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
        return sum_in_rank_order(x.unbind(0)).expand_as(x)
