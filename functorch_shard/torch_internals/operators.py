"""Operators of ours that compilers keep, where inductor has no plain one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .transforms import being_traced

_LIBRARY = torch.library.Library("functorch_shard", "FRAGMENT")
_LIBRARY.define("frexp(Tensor x) -> (Tensor, Tensor)")
_OPS: Any = torch.ops.functorch_shard


def frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.frexp``, whose exponents inductor (2.13, on the CPU) cannot convert to floats."""
    mantissa, exponent = _OPS.frexp(x) if being_traced() else torch.frexp(x)
    return mantissa, exponent


def _shape_of_frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int32)


def _frexp_of_batch(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Any, Any]:
    return _OPS.frexp(x), (in_dims[0], in_dims[0])


_LIBRARY.impl("frexp", lambda x: tuple(torch.frexp(x)), "CompositeExplicitAutograd")
torch.library.register_fake("functorch_shard::frexp", _shape_of_frexp, lib=_LIBRARY)
torch.library.register_vmap("functorch_shard::frexp", _frexp_of_batch, lib=_LIBRARY)
