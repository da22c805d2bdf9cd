"""A copy of a model without values, tensors put into it for a while, and whether they were filled."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the model with every tensor on the meta device; ties stay."""
    memo: dict[int, Any] = {}
    for x in model.parameters():  # of a DTensor the whole shape
        memo[id(x)] = nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device="meta"), x.requires_grad)
    for x in model.buffers():
        memo[id(x)] = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return copy.deepcopy(model, memo)


@contextmanager
def in_place(double: nn.Module, head: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """``tensors`` inside ``double``; afterwards it is as before, whatever was assigned inside module ``head``."""
    module, prefix = double.get_submodule(head), f"{head}." if head else ""
    before = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    try:
        for name, x in tensors.items():
            set_tensor(double, name, x)
        yield
    finally:
        for name, x in before:
            set_tensor(double, prefix + name, x)


def get_tensor(module: nn.Module, name: str) -> Any:
    return getattr(module.get_submodule(owner_of(name)), name.rpartition(".")[2], None)


def set_tensor(module: nn.Module, name: str, x: Tensor) -> None:
    setattr(module.get_submodule(owner_of(name)), name.rpartition(".")[2], x)


def owner_of(name: str) -> str:
    return name.rpartition(".")[0]


def title_of(model: nn.Module, name: str) -> str:
    kind = type(model.get_submodule(name)).__name__
    return f"{kind} {name!r}" if name else f"{kind}, the model itself,"


def unfit(got: Any, expected: Tensor) -> str:
    if not isinstance(got, Tensor):
        return f"put {type(got).__name__} there, expected a tensor"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        form = f"shape {tuple(got.shape)}, {got.dtype}"
        return f"put a tensor of {form} there, expected {tuple(expected.shape)}, {expected.dtype}"
    return "put a tensor without values there, on the meta device" if got.is_meta else ""


def has_nan(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def count_nan(x: Tensor) -> int:
    if x.is_complex():
        return int(x.isnan().sum())
    x = x.float() if x.dtype.itemsize == 1 else x  # float8 has no maximum
    # the largest value is NaN if any is, and takes no tensor of bools beside
    return int(x.isnan().sum()) if x.numel() and x.amax().isnan() else 0
