"""Assign whole parameters to ranks so that each has about the same work: pure arithmetic, the same on every rank.

Longest processing time first (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969): parameters in order of
decreasing cost, each to the rank with the least cost so far. The largest sum is at most 4/3 - 1/(3N) of the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def cost_of(shape: Sequence[int]) -> int:
    """The work of an update, up to a factor: products of a matrix with its own Gram matrix; else one pass over it.

    Dims behind the first are one, as for convolutions.
    """
    rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
    return rows * columns * min(rows, columns)


def assign(costs: Sequence[int], num_ranks: int, held: Sequence[Sequence[int]] = ()) -> list[int]:
    """Return the owner of each parameter.

    Args:
        costs: of each parameter.
        num_ranks: the owners to choose from.
        held: for each parameter the elements that each rank has of it already. Of ranks with the same work so far, the
            one with most of them is chosen, then the first.

    Returns:
        A rank for each parameter. Deterministic: equal arguments give equal owners.

    Example:
        >>> assign([2, 9, 4, 3], num_ranks=2)
        [1, 0, 1, 1]
    """
    work, owners = [0] * num_ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        has = held[i] if held else [0] * num_ranks
        owners[i] = min(range(num_ranks), key=lambda rank: (work[rank], -has[rank], rank))
        work[owners[i]] += costs[i]
    return owners
