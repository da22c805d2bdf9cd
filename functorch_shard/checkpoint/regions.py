"""A flat range of a row-major tensor as boxes, which true shapes in files are made of: pure integers.

Note [Boxes]: a shard holds a flat range of a parameter, ``p.flatten()[start:start + numel]``. In ``p`` itself that is
the end of one row, some whole rows and the beginning of another; the rows at both ends are cut in the same way, down to
single elements. So in N dims a range is at most ``2 * N - 1`` boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """The elements of a tensor from ``offsets`` up to ``offsets + sizes``; of a scalar, both are empty."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """``p[box.index]`` are the elements, without a copy."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """The elements that are in both, in the same coordinates; None where there are none."""
        both = list(zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        starts = tuple(max(mine, theirs) for mine, _, theirs, _ in both)
        ends = tuple(min(mine + n, theirs + m) for mine, n, theirs, m in both)
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: Box) -> Box:
        """The same elements in the coordinates of ``outer``, which starts at zeros there."""
        return Box(tuple(mine - start for mine, start in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def shifted(self, by: Sequence[int]) -> Box:
        """The box as far on in each dim: the other way round, from coordinates inside a box that starts at ``by``."""
        return Box(tuple(mine + more for mine, more in zip(self.offsets, by, strict=True)), self.sizes)


def boxes(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """The boxes that ``p.flatten()[start:start + numel]`` of a ``p`` of this ``shape`` consists of.

    Row-major and one after the other they are that range: ``cat([p[box.index].flatten() for box in ...])`` equals it.

    Args:
        shape: of the whole tensor; ``()`` is a scalar.
        start, numel: the range, in elements.

    Returns:
        At most ``2 * len(shape) - 1`` boxes, none of them empty; of a scalar one, of an empty range none.

    Raises:
        ValueError: the range is not inside the tensor.

    Example:
        >>> for offsets, sizes in boxes((4, 3), start=2, numel=8):   # the end of row 0, two rows, the start of row 3
        ...     print(offsets, sizes)
        (0, 2) (1, 1)
        (1, 0) (2, 3)
        (3, 0) (1, 1)
    """
    if start < 0 or numel < 0 or start + numel > prod(shape):
        total = prod(shape)
        raise ValueError(f"boxes: got elements {start} to {start + numel} of shape {tuple(shape)}, which has {total}")
    return list(_boxes(tuple(shape), start, start + numel)) if numel else []


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes of a tensor that have elements in common, if there are two.

    Boxes of ranks lie apart in one dim or the other: those that do in a dim are never compared. So a thousand that
    tile a tensor by rows, by columns or by both take about as many steps, and not their square.
    """
    groups = [[box for box in boxes if box.numel]]
    while groups:
        group = groups.pop()
        dims = range(len(group[0].sizes)) if group else ()
        parts = next((parts for dim in dims if len(parts := _apart(group, dim)) > 1), None)
        if parts:
            groups += [part for part in parts if len(part) > 1]
        elif found := next((pair for pair in combinations(group, 2) if pair[0].overlap(pair[1])), None):
            return found
    return None


def _apart(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Groups that have no index of ``dim`` in common."""
    groups: list[list[Box]] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if not groups or box.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offsets[dim] + box.sizes[dim])
    return groups


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Those of a range that is not empty: a row that starts inside, whole rows, a row that ends inside."""
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # the whole rows
    if first > last:  # inside one row
        yield from _in_row(last, shape, start, end)
        return
    if start < first * row:
        yield from _in_row(first - 1, shape, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < end:
        yield from _in_row(last, shape, last * row, end)


def _in_row(i: int, shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    row = prod(shape[1:])
    for offsets, sizes in _boxes(shape[1:], start - i * row, end - i * row):
        yield Box((i, *offsets), (1, *sizes))
