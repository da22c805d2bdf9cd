"""Splits a flat range of a row-major tensor into N-dimensional regions: pure integers.

Note [Regions]: a shard holds a flat range of a parameter, ``p.flatten()[start:start + numel]``. In ``p`` itself that is
the end of one row, some whole rows and the beginning of another; the rows at both ends are split in the same way, down
to single elements. So in N dims a range is at most ``2 * N - 1`` regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple


class Region(NamedTuple):
    """The elements of a tensor from ``offsets`` up to ``offsets + sizes``; both are empty for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """``p[region.index]`` are the elements, without a copy."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    @staticmethod
    def whole(shape: Sequence[int]) -> Region:
        return Region((0,) * len(shape), tuple(shape))

    def overlap(self, other: Region) -> Region | None:
        """The elements that both contain, in the same coordinates; None without any."""
        both = list(zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        starts = tuple(max(mine, theirs) for mine, _, theirs, _ in both)
        ends = tuple(min(mine + n, theirs + m) for mine, n, theirs, m in both)
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Region(starts, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: Region) -> Region:
        """The same elements in coordinates that start at the offsets of ``outer``."""
        return Region(tuple(mine - start for mine, start in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def shifted(self, by: Sequence[int]) -> Region:
        """The region moved by ``by``: the inverse of :meth:`inside`."""
        return Region(tuple(mine + more for mine, more in zip(self.offsets, by, strict=True)), self.sizes)


SCALAR = Region((), ())


def regions(shape: Sequence[int], start: int, numel: int) -> list[Region]:
    """Split ``p.flatten()[start:start + numel]``, for a ``p`` of this ``shape``, into regions of ``p``.

    The regions are in order: ``cat([p[region.index].flatten() for region in regions(...)])`` equals the range.
    """
    return list(_regions(tuple(shape), start, start + numel)) if numel else []


def first_overlap(regions: Sequence[Region]) -> tuple[Region, Region] | None:
    """Find two regions of a tensor that have elements in common.

    Regions of ranks are disjoint in one dim or another, and are then not compared in pairs. So regions that tile a
    tensor by rows, by columns or by both take about as many steps as there are regions, not their square.
    """
    groups = [[region for region in regions if region.numel]]
    while groups:
        group = groups.pop()
        dims = range(len(group[0].sizes)) if group else ()
        parts = next((parts for dim in dims if len(parts := _disjoint(group, dim)) > 1), None)
        if parts:
            groups += [part for part in parts if len(part) > 1]
        elif found := next((pair for pair in combinations(group, 2) if pair[0].overlap(pair[1])), None):
            return found
    return None


def _disjoint(regions: list[Region], dim: int) -> list[list[Region]]:
    """Split into groups that have no index of ``dim`` in common."""
    groups: list[list[Region]] = []
    end = 0
    for region in sorted(regions, key=lambda region: region.offsets[dim]):
        if not groups or region.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(region)
        end = max(end, region.offsets[dim] + region.sizes[dim])
    return groups


def _regions(shape: tuple[int, ...], start: int, end: int) -> Iterator[Region]:
    """Split a nonempty range: the end of a row, whole rows, the beginning of a row."""
    if not shape:
        yield Region((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # the whole rows
    if first > last:  # inside one row
        yield from _in_row(last, shape, start, end)
        return
    if start < first * row:
        yield from _in_row(first - 1, shape, start, first * row)
    if first < last:
        yield Region((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < end:
        yield from _in_row(last, shape, last * row, end)


def _in_row(i: int, shape: tuple[int, ...], start: int, end: int) -> Iterator[Region]:
    row = prod(shape[1:])
    for offsets, sizes in _regions(shape[1:], start - i * row, end - i * row):
        yield Region((i, *offsets), (1, *sizes))
