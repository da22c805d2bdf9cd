"""The dtypes that parameters are gathered and computed with in, and that gradients are reduced in."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a step, with FSDP's names and meanings: ``plan(model, mesh, precision=MixedPrecision(...))``.

    Parameters and optimizer state are stored as they are. Shards are cast *before* they are gathered, so a
    half-precision gather moves half the bytes. Integers and bools are never cast. ``gather`` and the reduction of
    gradients follow the policy of each unit by themselves; inputs, outputs and buffers are yours to cast.

    Args:
        param_dtype: what ``gather`` returns, and what the model computes in. ``None``: as stored.
        reduce_dtype: what gradients are summed over ranks in. ``None``: what they come in, and that is ``param_dtype``.
            Autograd sums the uses of one parameter on a rank in ``param_dtype``. Sums in float16 are divided in part
            before and in part after, as FSDP does it, against overflow.
        keep_low_precision_grads: whether gradients come back in the dtype they were reduced in, and not in the stored
            one. ``opt.step`` takes both; autograd's own (``torch.func.grad``) are always in the stored dtype.

    Raises:
        TypeError: a dtype that is not a floating-point one.

    Example:
        >>> bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        >>> values = {"fc.w": torch.ones(2)}
        >>> layout = fs.plan(values, fs.simulated_mesh(2), precision=bf16)
        >>> params = fs.shard(values, layout)
        >>> params["fc"].dtype, fs.gather(params)["fc.w"].dtype
        (torch.float32, torch.bfloat16)

    Stands for ``MixedPrecision`` of FSDP1 and ``MixedPrecisionPolicy`` of FSDP2.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"MixedPrecision: {name}: got {dtype!r}, expected a floating-point dtype or None")


def buffer_dtypes(
    stored: torch.dtype, precision: MixedPrecision, dtype: torch.dtype | None = None
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes to gather and to reduce in, and to return; ``dtype``: what one call gathers or gradients come in.

    Only floating-point numbers are cast; complex gradients are reduced as they come.
    """
    if not stored.is_floating_point:
        computed = dtype if dtype is not None and dtype.is_complex else stored
        return computed, computed, stored
    gathered = dtype or precision.param_dtype or stored
    kept = precision.reduce_dtype or precision.param_dtype or stored
    return gathered, precision.reduce_dtype or gathered, kept if precision.keep_low_precision_grads else stored


def divide_factors(num_ranks: int, reduced: torch.dtype) -> tuple[float, float]:
    """The divisors of a mean over ``num_ranks`` before and after its sum in ``reduced``.

    A sum of many float16 overflows and a quotient underflows: each takes about the root of the number of ranks, as in
    ``_get_gradient_divide_factors`` of torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """
    before = 1
    if reduced == torch.float16:
        while num_ranks % before == 0 and num_ranks / before > before:
            before *= 2
    return before, num_ranks / before
