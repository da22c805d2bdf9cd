"""Codecs: blocks of int8 or float8 with one scale each.

A codec is a pair of pure functions. ``encode`` takes 1-D elements and returns any pytree of tensors whose shapes depend
on their number alone; ``decode`` takes that tree and returns as many elements.

Blocks of int8 with a scale each are those of ZeRO++ (qwZ and qgZ, https://arxiv.org/abs/2306.10209).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Codec(NamedTuple):
    """Two pure functions that undo each other, more or less; any pair of callables serves."""

    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]


def int8(block: int = 256) -> Codec:
    """Blocks of int8 and a float32 scale for each: ``1 + 4 / block`` bytes an element.

    What comes back is off by at most ``1 / 254`` of the largest magnitude in its block. A NaN or an infinity makes its
    block NaN.

    Args:
        block: elements that share a scale.

    Example:
        >>> encode, decode = int8(block=2)
        >>> encode(torch.tensor([127.0, 1.0, 0.5]))
        (tensor([127,   1, 127], dtype=torch.int8), tensor([1.0000, 0.0039]))
        >>> decode(encode(torch.tensor([127.0, 1.4, 0.0])))
        tensor([127.,   1.,   0.])
    """
    blocks = _Blocks(torch.int8, 127.0, block)
    return Codec(blocks.encode, blocks.decode)


def float8(block: int = 256, dtype: torch.dtype = torch.float8_e4m3fn) -> Codec:
    """Blocks of float8 and a float32 scale for each: ``1 + 4 / block`` bytes an element, also where gloo has no float8.

    What comes back keeps 3 bits behind the leading one (2 with ``float8_e5m2``).

    Args:
        block: elements that share a scale.
        dtype: a float8 dtype with a sign.

    Example:
        >>> encode, decode = float8()
        >>> decode(encode(torch.tensor([448.0, 17.0, -3.0])))
        tensor([448.,  16.,  -3.])
    """
    blocks = _Blocks(dtype, torch.finfo(dtype).max, block)
    return Codec(blocks.encode, blocks.decode)


@dataclass(frozen=True)
class _Blocks:
    """Elements as multiples of their block's scale, none larger than ``largest``."""

    dtype: torch.dtype
    largest: float
    block: int

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"block: got {self.block!r}, expected a positive number of elements")

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._rows(x.float())
        scales = torch.linalg.vector_norm(rows, torch.inf, 1) / self.largest
        scales = torch.where(scales.isfinite(), scales, torch.nan)  # the values of the block are lost: show it
        too_small = scales < torch.finfo(scales.dtype).tiny  # to be divided by
        quotients = rows * torch.where(too_small, 0.0, 1 / scales).unsqueeze(1)
        values = quotients if self.dtype.is_floating_point else quotients.round_()
        return values.to(self.dtype).flatten()[: x.numel()], scales

    def decode(self, encoded: tuple[Tensor, Tensor]) -> Tensor:
        values, scales = encoded
        rows = self._rows(values.float() if self.dtype.is_floating_point else values)
        return (rows * scales.unsqueeze(1)).flatten()[: values.numel()]

    def _rows(self, x: Tensor) -> Tensor:
        rest = -x.numel() % self.block
        return (F.pad(x, (0, rest)) if rest else x).view(-1, self.block)  # (number of blocks, block)
