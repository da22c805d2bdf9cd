"""Regions are the flat range, in order, and few; tried on every range of small shapes."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from functorch_shard.checkpoint.format import Region, regions

SMALL_SHAPES = [shape for dims in range(4) for shape in product((0, 1, 2, 3), repeat=dims)] + [
    (2, 1, 3, 2),
    (2, 2, 2, 2),
]


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(prod(shape)).view(shape)


def elements(found: list[Region], shape: tuple[int, ...]) -> list[int]:
    whole = numbered(shape)
    return [element for region in found for element in whole[region.index].flatten().tolist()]


@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_the_regions_of_every_range_are_the_range_in_order(shape: tuple[int, ...]) -> None:
    numel = prod(shape)
    for start in range(numel + 1):
        for end in range(start, numel + 1):
            found = regions(shape, start, end - start)
            assert elements(found, shape) == list(range(start, end))
            assert len(found) <= max(2 * len(shape) - 1, 1)
            assert all(region.numel == prod(region.sizes) > 0 for region in found)


def every_region(shape: tuple[int, ...]) -> list[Region]:
    sides = [[(at, n) for at in range(size) for n in range(1, size - at + 1)] for size in shape]
    return [Region(tuple(at for at, _ in each), tuple(n for _, n in each)) for each in product(*sides)]


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (3, 1, 2)], ids=str)
def test_the_overlap_is_what_is_in_both(shape: tuple[int, ...]) -> None:
    for a, b in product(every_region(shape), repeat=2):
        both, overlap = set(elements([a], shape)) & set(elements([b], shape)), a.overlap(b)
        assert (set(elements([overlap], shape)) if overlap else set()) == both
        if overlap:
            assert overlap.numel == len(both)
            assert torch.equal(numbered(shape)[a.index][overlap.inside(a).index], numbered(shape)[overlap.index])
