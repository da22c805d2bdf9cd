"""``stream``: whole parameters one after the other, with one unit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..collectives.without_derivative import constants
from ..layout.trees import Full, Sharded, by_unit, map_items
from ..layout.validation import check_sharded
from .gather import gather


def stream(params: Sharded, *, dtype: torch.dtype | None = None) -> Stream:
    """The whole parameters, one ``(name, tensor)`` after the other, with one unit gathered at a time.

    ``dict(stream(params))`` equals ``gather(params, lazy=False)`` in the stored dtypes, or in ``dtype``. Names and
    shapes are known before anything is gathered, and every tensor stays valid after the next one was asked for: nothing
    is written to memory that was handed out. For inference engines that load weights, and for exports.

    Args:
        params: a ``Sharded``, or a stacked one outside ``spmd`` on simulated ranks.
        dtype: the dtype of floating-point tensors; integers keep theirs. ``None``: as stored.

    Returns:
        An iterable that may be iterated again. ``stream.shapes`` maps names to shapes and ``stream.dtypes`` names to
        dtypes, in the order of the tensors; ``stream.aliases`` maps further names of tied parameters to the first,
        which is the one that comes. Tensors have no graph.

    Raises:
        TypeError: ``params`` is not a ``Sharded``, or ``dtype`` not a floating-point dtype.
        NotImplementedError: inside a derivative by ``params``, one that goes through the tensors.

    Cost:
        The collectives of one gather. All real ranks iterate alike, each to its end or to the same tensor. Memory: one
        unit, beside what the caller keeps.

    Example:
        >>> values = {"a.w": torch.tensor([1.0, 2.0, 3.0]), "b.w": torch.ones(2, 2)}
        >>> weights = stream(fs.shard(values, fs.plan(values, fs.simulated_mesh(2))), dtype=torch.bfloat16)
        >>> weights.shapes
        {'a.w': (3,), 'b.w': (2, 2)}
        >>> for name, x in weights:
        ...     print(name, x.dtype, x.sum().item())
        a.w torch.bfloat16 6.0
        b.w torch.bfloat16 4.0

    Stands for ``summon_full_params`` around a loop over ``named_parameters()``.
    """
    check_sharded("stream", params, "; it is whole already" if isinstance(params, Full) else "")
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"stream: dtype: got {dtype}, expected a floating-point dtype, or None for the stored ones")
    return Stream(params, dtype)


@dataclass(frozen=True)
class Stream:
    """Whole parameters by name, unit by unit; made by :func:`stream`."""

    params: Sharded = field(repr=False)
    dtype: torch.dtype | None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.params.layout.slots[name].shape for name in self._names()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        stored = {name: self.params.layout.slots[name].dtype for name in self._names()}
        return {name: self.dtype if self.dtype and x.is_floating_point else x for name, x in stored.items()}

    @property
    def aliases(self) -> Mapping[str, str]:
        return dict(self.params.layout.aliases)

    def __len__(self) -> int:
        return len(self.params.layout.slots)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for unit in by_unit(Sharded(dict(self.params), self.params.layout.as_stored())):
            with torch.no_grad():
                whole = gather(map_items(lambda _, x: x.detach(), unit), lazy=False, dtype=self.dtype)
            yield from constants("stream", whole, unit.values()).items()

    def _names(self) -> Iterator[str]:
        for layout in self.params.layout.by_unit():
            yield from layout.slots
