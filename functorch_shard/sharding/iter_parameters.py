"""``iter_parameters``: whole parameters with one unit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..collectives.sinks import inside, without_derivative
from ..layout.layout import as_stored
from ..layout.trees import Full, Sharded, by_unit, check_sharded, check_shards, map_items
from ..torch_internals.autograd import in_transform
from .gather import gather


def iter_parameters(params: Sharded, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the whole parameters, gathering one unit at a time.

    ``dict(iter_parameters(params))`` equals ``gather(params, lazy=False)`` in the stored dtypes, or in ``dtype``. Every
    tensor stays valid after the next one was asked for. For inference engines that load weights, and for exports.

    Args:
        params: a ``Sharded``, or a stacked one outside ``spmd`` on simulated ranks.
        dtype: the dtype of floating-point tensors; integers keep theirs. ``None``: as stored.

    Returns:
        An iterator of ``(name, tensor)``, unit by unit, without a graph. A tied parameter comes once, under its first
        name. ``params.layout.slots`` has shapes and dtypes beforehand, ``params.layout.aliases`` the further names.

    Raises:
        TypeError: ``params`` is not a ``Sharded``, or ``dtype`` not a floating-point dtype.
        ValueError: shards that do not fit their layout.
        NotImplementedError: a derivative by ``params`` goes through the tensors.

    Cost:
        The collectives of one gather. All real ranks iterate alike, each to its end or to the same tensor. Memory: one
        unit, beside what the caller keeps.

    Example:
        >>> values = {"a.w": torch.tensor([1.0, 2.0, 3.0]), "b.w": torch.ones(2, 2)}
        >>> params = fs.shard(values, fs.plan(values, fs.simulated_mesh(2)))
        >>> for name, x in iter_parameters(params, dtype=torch.bfloat16):
        ...     print(name, x.dtype, x.sum().item())
        a.w torch.bfloat16 6.0
        b.w torch.bfloat16 4.0

    Stands for ``summon_full_params`` around a loop over ``named_parameters()``.
    """
    check_sharded("iter_parameters", params, "; it is whole already" if isinstance(params, Full) else "")
    check_shards("iter_parameters", params, params.layout)
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"iter_parameters: dtype: got {dtype}, expected a floating-point dtype, or None")
    stored = Sharded(dict(params), as_stored(params.layout))
    return _iterate(stored, dtype)


def _iterate(params: Sharded, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for unit in by_unit(params):
        with torch.no_grad():
            whole: Mapping[str, Tensor] = gather(map_items(lambda _, x: x.detach(), unit), lazy=False, dtype=dtype)
        if in_transform() or (inside() and torch.is_grad_enabled()):
            whole = without_derivative(_NO_DERIVATIVE, whole, unit.values())
        yield from whole.items()


_NO_DERIVATIVE = (
    "iter_parameters: its tensors have no derivative by the parameters. Use gather, or pass detached shards."
)
