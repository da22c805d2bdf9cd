"""Tensors of every dtype, compared bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
]


def of_every_dtype() -> dict[str, Tensor]:
    torch.manual_seed(1)
    tensors = {f"m{i}.w": (9 * torch.randn(3, 5)).to(dtype) for i, dtype in enumerate(DTYPES)}
    return tensors | {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "nan": torch.tensor([0.0, float("nan")])}


def bits(x: Tensor) -> list[int]:
    return x.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same_bits(got: Any, expected: Any) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert (got[name].dtype, got[name].shape, bits(got[name])) == (x.dtype, x.shape, bits(x.detach())), name
