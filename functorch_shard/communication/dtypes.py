"""Dtypes in which numbers are sent or compared where a library cannot do it in their own: pure tensor functions."""

from __future__ import annotations

import torch
from torch import Tensor

# What gloo can send; other dtypes (float8, unsigned 16 to 64 bits, complex) are sent as their bytes.
_SENDABLE = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}


def as_sendable(x: Tensor) -> Tensor:
    return x if x.dtype in _SENDABLE else x.unsqueeze(-1).view(torch.uint8)


def as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def from_real(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(x) if dtype.is_complex else x


def as_ordered(x: Tensor) -> Tensor:
    """Integers in the order of the floats, NaN above all: libraries compare floats, and a NaN is lost by a comparison.

    Gloo keeps a NaN of the first rank alone.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    bits = wide.masked_fill(wide.isnan(), torch.nan).view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    return _flip_negative(bits)


def from_ordered(order: Tensor, dtype: torch.dtype) -> Tensor:
    bits = _flip_negative(order)
    return bits.view(torch.float64 if bits.dtype == torch.int64 else torch.float32).to(dtype)


def _flip_negative(bits: Tensor) -> Tensor:
    """Floats are a sign and a magnitude; its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
