"""Units and slots from JSON, and what JSON has no word for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .buffers import Buffer, Slot, Unit
from .dtensor_spec import DTensorForm
from .precision import MixedPrecision


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unit_of(data: Any) -> Unit:
    policy: dict[str, Any] = {k: _dtype(k, v) if isinstance(v, str) else v for k, v in data["precision"].items()}
    return Unit(data["name"], tuple(map(_buffer_of, data["buffers"])), MixedPrecision(**policy))


def _buffer_of(data: Any) -> Buffer:
    return Buffer(**{**data, "slots": tuple(map(_slot_of, data["slots"]))})


def _slot_of(data: Any) -> Slot:
    form = {"dtensor": _form_of(data["dtensor"])} if "dtensor" in data else {}
    return Slot(**{**data, "shape": tuple(data["shape"]), "dtype": _dtype(data["name"], data["dtype"]), **form})


def _form_of(data: Any) -> DTensorForm:
    return DTensorForm(tuple(data["shape"]), tuple(data["placements"]), tuple((name, n) for name, n in data["axes"]))


def without_none(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None}


def _dtype(what: str, name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{what!r}: {name!r} is no dtype")
    return dtype
