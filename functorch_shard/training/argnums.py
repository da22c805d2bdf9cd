"""What ``fs.grad`` is asked for, and what the function that it differentiates returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Argnums = int | Sequence[int]


def as_asked(trees: Sequence[Any], argnums: Argnums) -> Any:
    """One gradient for an int, a tuple of them for several positions."""
    return trees[0] if isinstance(argnums, int) else tuple(trees)


def positions(argnums: Argnums, num_args: int) -> list[int]:
    """The positions that ``argnums`` names, from 0; raises unless they are different ones of ``num_args``."""
    chosen = [argnums] if isinstance(argnums, int) else list(argnums)
    if not all(isinstance(i, int) for i in chosen):
        raise TypeError(f"grad: argnums: got {argnums!r}, expected an int or a sequence of ints")
    found = [i % num_args for i in chosen if -num_args <= i < num_args]
    if not chosen or len(set(found)) < len(chosen):
        raise ValueError(
            f"grad: argnums: got {argnums}, expected one or more different positions, but the function was called with "
            f"{num_args} positional arguments"
        )
    return found


def check_scalar(result: Any, has_aux: bool) -> tuple[Tensor, Any]:
    """The scalar and ``aux`` that a differentiated function returned; raises where it returned something else."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"grad: has_aux=True: expected the function to return (scalar, aux), got {type(result).__name__}"
        )
    value, aux = result if has_aux else (result, None)
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        got = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"grad: expected the function to return a floating-point scalar tensor, got {got}")
    return value, aux
