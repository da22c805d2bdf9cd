"""A reduction of encoded messages: a codec before what is sent, and behind what is received."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..communication.axis import Axis
from ..torch_internals.autograd import Function
from .codecs import Codec, Form, decode_rows, encode_rows
from .operands import aside, fold, place_of, stack


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
