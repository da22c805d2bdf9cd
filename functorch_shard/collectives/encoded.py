"""Collectives of encoded messages: a codec before what is sent, and behind what is received."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from ..communication.axis import Axis
from ..layout.precision import Travel
from .codecs import Codec, Form, decode_rows, encode_rows
from .operands import aside, fold, place_of, save_static, saved, stack
from .rules import AllGather, PsumScatter


def gather_encoded(x: Tensor, axis: Axis, dtypes: Travel, codec: Codec) -> Tensor:
    """``gather_shards`` of what comes out of ``codec``; the derivative is that of ``gather_shards`` itself."""
    return _GatherEncoded.apply(x, *place_of(axis), axis, dtypes, codec)


class _GatherEncoded(Function):
    """Ranks are laid side by side in the last dim, behind any batch dims."""

    @staticmethod
    def forward(
        x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, dtypes: Travel, codec: Codec
    ) -> Tensor:
        message, form = encode_rows(x.to(dtypes.stored), codec)
        return _decoded(axis.issue("all_gather", message, dim=x.ndim - 1).wait(), axis, form, codec).to(dtypes.gathered)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *place, axis, dtypes, _ = saved(ctx)
        return PsumScatter.apply(grad, *place, axis, grad.ndim - 1, dtypes), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        *place, axis, dtypes, _ = saved(ctx)
        return AllGather.apply(tangent, *place, axis, tangent.ndim - 1, dtypes)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        index: Tensor | None,
        others: Tensor | None,
        axis: Axis,
        dtypes: Travel,
        codec: Codec,
    ) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0])
            return _GatherEncoded.apply(x, index, others, fold(axis, info, in_dims), dtypes, codec), batch_dim
        message, form = encode_rows(stack(x, in_dims[0], axis).to(dtypes.stored), codec)
        gathered = axis.issue("all_gather", message, dim=message.ndim - 2).wait()
        return _decoded(gathered, axis, form, codec).to(dtypes.gathered), None


def _decoded(messages: Tensor, axis: Axis, form: Form, codec: Codec) -> Tensor:
    """Whole buffers of the messages of all ranks, side by side in the last dim as they are."""
    return decode_rows(_parts(messages, axis), form, codec).flatten(-2)


def _parts(x: Tensor, axis: Axis) -> Tensor:
    """The last dim as one row for each rank."""
    return x.unflatten(-1, (axis.size, x.shape[-1] // axis.size))


def scatter_encoded(x: Tensor, axis: Axis, codec: Codec) -> tuple[Tensor, Tensor]:
    """``psum_scatter`` of what ``codec`` makes of each rank's part, and what it lost of ``x``. Has no derivative."""
    return _ScatterEncoded.apply(x, *place_of(axis), axis, codec)


class _ScatterEncoded(Function):
    @staticmethod
    def forward(
        x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, codec: Codec
    ) -> tuple[Tensor, Tensor]:
        parts = _parts(x, axis)
        messages, form = encode_rows(parts, codec)
        received = axis.issue("all_to_all", messages, dim=messages.ndim - 2).wait()
        return _added(received, form, codec), (parts - decode_rows(messages, form, codec)).flatten(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(_NO_DERIVATIVE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_DERIVATIVE)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, codec: Codec
    ) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0])
            return _ScatterEncoded.apply(x, index, others, fold(axis, info, in_dims), codec), (batch_dim, batch_dim)
        parts = _parts(stack(x, in_dims[0], axis), axis)
        messages, form = encode_rows(parts, codec)
        received = axis.issue("all_to_all", messages, dim=messages.ndim - 3).wait()
        return (_added(received, form, codec), (parts - decode_rows(messages, form, codec)).flatten(-2)), (0, 0)


def _added(messages: Tensor, form: Form, codec: Codec) -> Tensor:
    """The sum of the rows in dim -2, in rank order."""
    total, *addends = decode_rows(messages, form, codec).unbind(-2)
    for addend in addends:
        total = total + addend
    return total


_NO_DERIVATIVE = (
    "a reduction of encoded gradients has no derivative: use scatter_grads where somebody differentiates it."
)
