"""Compressed communication: all-gather shards as int8 blocks, or with your own ``(encode, decode)``.

``gather(params, codec=fs.codecs.int8())`` gathers encoded shards. A codec is a pair of pure functions. ``encode`` takes
1-D elements and returns any pytree of tensors whose shapes depend on their number only; ``decode`` takes that tree and
returns as many elements. Rows are sent as messages of bytes, over any backend. Blocks of int8 with a scale each are
those of ZeRO++ (qwZ, https://arxiv.org/abs/2306.10209).

Imported by ``gather`` where a codec is given; imports ``communication`` and what is below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from ..communication.backend import Work
from ..torch_internals.autograd import Function, traced_for_compiler

__all__ = ["Codec", "int8"]

# Every message is a multiple of the largest item (complex128), so that each begins where any dtype may.
_ALIGNMENT = 16


class Codec(NamedTuple):
    """Two pure functions that undo each other, more or less; any pair of callables serves."""

    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]


def int8(block: int = 256) -> Codec:
    """Blocks of int8 and a float32 scale for each: ``1 + 4 / block`` bytes an element.

    What comes back is off by at most ``1 / 254`` of the largest magnitude in its block, if float32 has its scale. A NaN
    or an infinity makes its block NaN.

    Args:
        block: elements that share a scale.

    Example:
        >>> encode, decode = int8(block=2)
        >>> encode(torch.tensor([127.0, 1.0, 0.5]))
        (tensor([127,   1, 127], dtype=torch.int8), tensor([1.0000, 0.0039]))
        >>> decode(encode(torch.tensor([127.0, 1.4, 0.0])))
        tensor([127.,   1.,   0.])
    """

    def rows(x: Tensor) -> Tensor:
        rest = -x.numel() % block
        return (F.pad(x, (0, rest)) if rest else x).view(-1, block)  # (number of blocks, block)

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = rows(x.float())
        scales = torch.linalg.vector_norm(blocks, torch.inf, 1) / 127.0
        scales = torch.where(scales.isfinite(), scales, torch.nan)  # the values of the block are lost: show it
        too_small = scales < torch.finfo(scales.dtype).tiny  # to be divided by
        quotients = blocks * torch.where(too_small, 0.0, 1 / scales).unsqueeze(1)
        return quotients.round_().to(torch.int8).flatten()[: x.numel()], scales

    def decode(encoded: tuple[Tensor, Tensor]) -> Tensor:
        values, scales = encoded
        return (rows(values) * scales.unsqueeze(1)).flatten()[: values.numel()]

    return Codec(encode, decode)


@dataclass(frozen=True)
class Form:
    """How the tensors of one encoded row lie side by side in a message."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    numel: int


@dataclass(frozen=True)
class RowEncoding:
    """A codec of rows: what a gather sends in place of elements."""

    codec: Codec

    def encode(self, x: Tensor) -> tuple[Tensor, Form]:
        """Encode each row of the last dim as one message: ``(*batch, n)`` to uint8 ``(*batch, bytes)``."""
        if x.ndim == 1:
            return self._message(x)
        messages, forms = zip(*map(self._message, _rows(x)), strict=True)
        if any(form != forms[0] for form in forms):
            raise ValueError(f"codec: encode gave other shapes for other values: {forms}")
        return torch.stack(messages).view(*x.shape[:-1], messages[0].numel()), forms[0]

    def decode(self, messages: Tensor, form: Form) -> Tensor:
        """Decode what :meth:`encode` returned: uint8 ``(*batch, bytes)`` to ``(*batch, n)``."""
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(form.shapes, form.dtypes, strict=True)]
        rows: list[Tensor] = []
        for message in _rows(messages):
            parts = message[: sum(sizes)].split(sizes)
            bits: list[Any] = [_Bits.apply(part, dtype) for part, dtype in zip(parts, form.dtypes, strict=True)]
            leaves = [x.view(shape) for x, shape in zip(bits, form.shapes, strict=True)]
            rows.append(self.codec.decode(optree.tree_unflatten(form.treedef, leaves)))
        return torch.stack(rows).view(*messages.shape[:-1], form.numel)

    def gather(self, x: Tensor, size: int, send: Callable[[Tensor], Work]) -> Work:
        """Gather the rows of ``size`` ranks; ``send`` lays messages side by side in the last dim."""
        messages, form = self.encode(x)
        sizes = size, messages.shape[-1]
        return send(messages).then(lambda all_: self.decode(all_.unflatten(-1, sizes), form).flatten(-2))

    def recode(self, x: Tensor) -> Tensor:
        """Encode and decode rows of the last dim; not differentiated."""
        return torch.stack([self.codec.decode(self.codec.encode(row)) for row in _rows(x)]).view(x.shape)

    def _message(self, row: Tensor) -> tuple[Tensor, Form]:
        leaves, treedef = optree.tree_flatten(self.codec.encode(row))
        form = Form(treedef, tuple(tuple(x.shape) for x in leaves), tuple(x.dtype for x in leaves), row.numel())
        message = torch.cat([_Bits.apply(x.contiguous().view(-1), torch.uint8) for x in leaves])
        length = max(-(-message.numel() // _ALIGNMENT), 1) * _ALIGNMENT  # an empty row may have any offset
        return F.pad(message, (0, length - message.numel())), form


class _Bits(Function):
    """The bytes of rows of numbers as another dtype: torch 2.11 has no batching rule for that."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.resolve_conj().resolve_neg().contiguous()
        strided = x.ndim > 0 and x.stride(-1) != 1  # a single number is contiguous, whatever its stride
        copied = strided or x.storage_offset() * x.itemsize % dtype.itemsize  # bytes begin anywhere in a message
        return (x.clone(memory_format=torch.contiguous_format) if copied else x).view(dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dtype: torch.dtype) -> Any:
        return _Bits.apply(x.movedim(in_dims[0], 0), dtype), 0


def _rows(x: Tensor) -> Sequence[Tensor]:
    if traced_for_compiler():
        raise NotImplementedError(
            "codec: inductor reads other bytes from a message. Use fs.compile(step, backend='replay'), or no codec."
        )
    return x.flatten(0, -2).unbind(0) if x.ndim > 1 else (x,)
