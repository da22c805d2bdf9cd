"""Encoded rows as messages of bytes: the tensors of one rank are sent as one message, on any backend, in any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_internals.autograd import Function, traced_for_compiler, with_outer_tangents
from .blocks import Codec

# Every message is a multiple of the largest item (complex128), so that each begins where any dtype may.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Form:
    """How the tensors of one encoded row lie side by side in a message, largest items first."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    numel: int

    @property
    def order(self) -> list[int]:
        return sorted(range(len(self.dtypes)), key=lambda i: -self.dtypes[i].itemsize)


def encoding(verb: str, codec: Any) -> RowEncoding:
    """Return the encoding of rows by ``codec``, a pair ``(encode, decode)``."""
    if not (isinstance(codec, Sequence) and len(codec) == 2 and all(callable(half) for half in codec)):
        raise TypeError(f"{verb}: codec: got {codec!r}, expected (encode, decode), two functions, as fs.codecs.int8()")
    return RowEncoding(Codec(*codec))


@dataclass(frozen=True)
class RowEncoding:
    """A codec of rows: what a gather or a reduction sends in place of elements."""

    codec: Codec

    def encode(self, x: Tensor) -> tuple[Tensor, Form]:
        """Encode each row of the last dim as one message: ``(*batch, n)`` to uint8 ``(*batch, bytes)``."""
        if x.ndim == 1:
            return _encode(_rows(x)[0], self.codec)
        messages, forms = zip(*(_encode(row, self.codec) for row in _rows(x)), strict=True)
        if any(form != forms[0] for form in forms):
            raise ValueError(
                f"codec: encode gave other shapes for other values: {forms}. They may depend on the size alone."
            )
        return torch.stack(messages).view(*x.shape[:-1], messages[0].numel()), forms[0]

    def decode(self, messages: Tensor, form: Form) -> Tensor:
        """Decode what :meth:`encode` returned: uint8 ``(*batch, bytes)`` to ``(*batch, n)``."""
        rows = [_decode(row, form, self.codec) for row in _rows(messages)]
        return torch.stack(rows).view(*messages.shape[:-1], form.numel)

    def recode(self, x: Tensor) -> Tensor:
        """Encode and decode rows of the last dim; the derivative passes straight through."""
        return _Recode.apply(x, self.codec)


class _Recode(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, codec: Codec) -> Tensor:
        return torch.stack([codec.decode(codec.encode(row)) for row in _rows(x)]).view(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        with with_outer_tangents():
            return tangent.view_as(tangent)


class _Bits(Function):
    """The bytes of rows of numbers as another dtype: torch 2.11 has no batching rule for that."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.resolve_conj().resolve_neg().contiguous()
        strided = x.ndim > 0 and x.stride(-1) != 1  # a single number is contiguous, whatever its stride
        return (x.clone(memory_format=torch.contiguous_format) if strided else x).view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dtype: torch.dtype) -> Any:
        return _Bits.apply(x.movedim(in_dims[0], 0), dtype), 0


def _rows(x: Tensor) -> Sequence[Tensor]:
    if traced_for_compiler():
        raise NotImplementedError(
            "codec: a compiler would change what is sent: inductor (2.13, on the CPU) reads other bytes from parts of "
            "a message. Use fs.compile(step, backend='replay'), or gather without a codec."
        )
    return x.flatten(0, -2).unbind(0) if x.ndim > 1 else (x,)


def _encode(row: Tensor, codec: Codec) -> tuple[Tensor, Form]:
    leaves, treedef = optree.tree_flatten(codec.encode(row))
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError(f"codec: encode returned {leaves}, expected a pytree of tensors")
    form = Form(treedef, tuple(tuple(x.shape) for x in leaves), tuple(x.dtype for x in leaves), row.numel())
    pieces = [_Bits.apply(leaves[i].contiguous().view(-1), torch.uint8) for i in form.order]
    message = torch.cat(pieces)
    length = max(-(-message.numel() // _ALIGNMENT), 1) * _ALIGNMENT  # an empty row may have any offset
    return F.pad(message, (0, length - message.numel())), form


def _decode(message: Tensor, form: Form, codec: Codec) -> Tensor:
    leaves: list[Any] = [None] * len(form.dtypes)
    offset = 0
    for i in form.order:
        dtype, numel = form.dtypes[i], prod(form.shapes[i])
        bits: Any = _Bits.apply(message[offset : offset + numel * dtype.itemsize], dtype)
        leaves[i] = bits.view(form.shapes[i])
        offset += numel * dtype.itemsize
    x = codec.decode(optree.tree_unflatten(form.treedef, leaves))
    if not isinstance(x, Tensor) or tuple(x.shape) != (form.numel,):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"codec: decode returned {got}, expected a tensor of the shape ({form.numel},) that was encoded"
        )
    return x
