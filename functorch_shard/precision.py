"""In which dtypes parameters travel and are computed with, and gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a step, with FSDP's names and meanings: ``plan(model, mesh, precision=MixedPrecision(...))``.

    Parameters, gradients and optimizer state are stored as they are. Shards are cast *before* they travel, so a
    half-precision gather moves half the bytes. Integers and bools are never cast.

    Args:
        param_dtype: what ``gather`` returns, and what the model computes in. ``None``: as stored.
        reduce_dtype: what gradients are summed over ranks in. ``None``: what they come in, and that is ``param_dtype``.

    Example:
        >>> bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        >>> values = {"fc.w": torch.ones(2)}
        >>> layout = fs.plan(values, fs.simulated_mesh(2), precision=bf16)
        >>> params = fs.shard(values, layout)
        >>> params["fc"].dtype, fs.gather(params)["fc.w"].dtype
        (torch.float32, torch.bfloat16)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"MixedPrecision: {name}: got {dtype!r}, expected a floating-point dtype or None")


@dataclass(frozen=True)
class Travel:
    """The dtypes of one buffer on its way: how it is stored, gathered, and reduced."""

    stored: torch.dtype
    gathered: torch.dtype
    reduced: torch.dtype


def travel(stored: torch.dtype, precision: MixedPrecision, dtype: torch.dtype | None = None) -> Travel:
    """How a buffer travels under ``precision``; ``dtype`` is what one call asks it to be gathered in."""
    if not stored.is_floating_point:
        return Travel(stored, stored, stored)
    gathered = dtype or precision.param_dtype or stored
    return Travel(stored, gathered, precision.reduce_dtype or gathered)
