"""Texts of options as values; each raises a ``ValueError`` that says what was expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite, prod
from typing import TypeVar

import torch

from .. import MixedPrecision
from ..errors import hint

Value = TypeVar("Value")
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    name.lower(): x
    for name, x in vars(torch.optim).items()
    if isinstance(x, type) and issubclass(x, torch.optim.Optimizer) and x is not torch.optim.Optimizer
}


def numbers(text: str) -> tuple[int, ...]:
    """``8,64,512``: numbers of ranks."""
    expected = "numbers of ranks above 0, for example 8,64,512"
    return tuple(_value(int, part, text, expected, lambda n: n > 0) for part in text.split(","))


def axes(text: str) -> dict[str, int]:
    """``replicate=2,shard=-1``: sizes by name; one of them may be -1, which stands for the ranks that are left."""
    expected = "sizes by name, for example replicate=2,shard=-1"
    sizes = _pairs(text, int, expected, lambda n: n > 0 or n == -1)
    unknown = [name for name in sizes if name not in ("shard", "replicate")]
    if unknown:
        raise ValueError(f"got {text!r}, expected the axes shard and replicate; {unknown[0]!r} is neither")
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(f"got {text!r}, expected -1 for one axis at most")
    return sizes


def sized(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The axes of a mesh of so many ranks."""
    fixed = prod(size for size in sizes.values() if size != -1)
    made = {name: ranks // fixed if size == -1 else size for name, size in sizes.items()}
    if prod(made.values()) != ranks:
        given = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"plan: --axes: {given} does not divide {ranks:,} ranks of --ranks: {fixed} are fixed")
    return made


def optimizer(text: str) -> type[torch.optim.Optimizer]:
    """``adamw``: a class of ``torch.optim``, in upper or lower case."""
    if text.lower() not in OPTIMIZERS:
        guess = hint(text.lower(), [*OPTIMIZERS])
        raise ValueError(f"got {text!r}, expected a class of torch.optim, for example adamw{guess}")
    return OPTIMIZERS[text.lower()]


def precision(text: str) -> MixedPrecision:
    """``bf16`` or ``bf16,fp32``: the gathered dtype, and the reduced one."""
    parts = text.split(",")
    if len(parts) > 2 or any(part not in DTYPES for part in parts):
        raise ValueError(f"got {text!r}, expected a dtype or two of {', '.join(DTYPES)}, for example bf16,fp32")
    gathered, *reduced = (DTYPES[part] for part in parts)
    return MixedPrecision(gathered, reduced[0] if reduced else None)


def units(text: str) -> str | int | tuple[str, ...]:
    """``auto``, ``blocks``, a number of bytes, or names of module classes separated by commas."""
    if text in ("auto", "blocks"):
        return text
    if text.lstrip("-").isdigit():
        return _value(int, text, text, "a number of bytes above 0", lambda n: n > 0)
    names = tuple(text.split(","))
    if not all(name.isidentifier() for name in names):
        raise ValueError(f"got {text!r}, expected auto, blocks, a number of bytes, or module classes: Block,Embedding")
    return names


def bandwidth(text: str) -> dict[str, float]:
    """``50`` or ``shard=300,replicate=25``: GB/s by axis; the name ``""`` stands for every other axis."""
    expected = "GB/s above 0, for example 50, or shard=300,replicate=25"
    return _pairs(text, float, expected, _is_positive) if "=" in text else {"": _positive(text, expected)}


def positive(text: str) -> float:
    """A number above 0."""
    return _positive(text, "a number above 0")


def _positive(text: str, expected: str) -> float:
    return _value(float, text, text, expected, _is_positive)


def _is_positive(x: float) -> bool:
    return isfinite(x) and x > 0


def _pairs(
    text: str, convert: Callable[[str], Value], expected: str, fits: Callable[[Value], bool]
) -> dict[str, Value]:
    cut = [part.partition("=") for part in text.split(",")]
    names = [name for name, _, _ in cut]
    if not all(name.isidentifier() for name in names) or len({*names}) < len(names):
        raise ValueError(f"got {text!r}, expected {expected}")
    return {name: _value(convert, value, text, expected, fits) for name, _, value in cut}


def _value(
    convert: Callable[[str], Value], part: str, text: str, expected: str, fits: Callable[[Value], bool]
) -> Value:
    try:
        value = convert(part)
    except ValueError:
        raise ValueError(f"got {text!r}, expected {expected}") from None
    if not fits(value):
        raise ValueError(f"got {text!r}, expected {expected}")
    return value
