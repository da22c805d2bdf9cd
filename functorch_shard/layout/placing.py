"""Where parameters are in a buffer: one after the other, and cut between shards only where that is allowed.

Note [Granularity]: a parameter of granularity g is cut at multiples of g elements from its own start: at rows, or at
blocks that are quantised together. Shards stay equally long, so padding goes between parameters: one that would be cut
elsewhere is moved towards the next boundary of shards. A parameter that is longer than a shard contains several
boundaries, a shard apart, so the shard is a multiple of its granularity. If all parameters of a buffer have the same
one, their offsets are multiples of it as well: the blocks of a flat shard are those of its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm
from typing import Literal, NamedTuple

from torch import Tensor

_BLOCK = 64  # the last elements of a kernel round otherwise: on any number of ranks there are none in multiples of this
_LARGE = 4096  # so padding is at most 1.6 %
Granularity = int | Literal["rows"]


class Size(NamedTuple):
    """The elements of a parameter, and at which multiples it may be cut."""

    numel: int
    granularity: int


def padded(numel: int, step: int) -> int:
    """``numel`` rounded up to a multiple of ``step``."""
    return -(-numel // step) * step


def granularity_of(part: Tensor, granularity: Granularity) -> int:
    """The number of elements at whose multiples ``part`` may be cut; of rows, the elements of one."""
    if isinstance(granularity, int):
        return granularity
    return max(part[:1].numel(), 1) if part.ndim else 1


def place(sizes: Sequence[Size], num_shards: int, align: int) -> tuple[list[int], int]:
    """The offset of each parameter, all multiples of ``align``, and the number of elements of one shard."""
    if all(size.granularity == 1 for size in sizes):
        offsets, end = _offsets(sizes, 0, align)
        shard = -(-end // num_shards)
        return offsets, padded(shard, _BLOCK) if align > 1 and shard >= _LARGE else shard
    align = lcm(align, gcd(*(size.granularity for size in sizes)))
    least = -(-sum(size.numel for size in sizes) // num_shards)
    while True:
        shard = _shard_numel(sizes, least, align)
        offsets, end = _offsets(sizes, shard, align)
        if end <= num_shards * shard:
            return offsets, shard
        least = max(shard + 1, -(-end // num_shards))


def _shard_numel(sizes: Sequence[Size], least: int, align: int) -> int:
    """The smallest shard from ``least`` on that is a multiple of the granularity of all parameters longer than it."""
    shards, step = [], align
    for size in sorted(sizes, reverse=True):
        shards.append(padded(max(least, size.numel), step))
        step = lcm(step, size.granularity)
    return min(*shards, padded(least, step))


def _offsets(sizes: Sequence[Size], shard: int, align: int) -> tuple[list[int], int]:
    """Offsets in shards of this size, and the end of the last parameter; a ``shard`` of 0 is not looked at."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(_start(padded(end, align), size, shard, align))
        end = offsets[-1] + size.numel
    return offsets, end


def _start(at: int, size: Size, shard: int, align: int) -> int:
    """The first offset from ``at`` on from which the next boundary is a multiple of the granularity away."""
    boundary = padded(at, shard) if shard else at
    if at == boundary or at + size.numel <= boundary:
        return at
    step = lcm(size.granularity, align)  # boundaries and offsets are multiples of align
    return boundary - (boundary - at) // step * step
