"""Regions are the flat range, in order, and few; tried on every range of small shapes."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from functorch_shard.checkpoint.format import regions

SMALL_SHAPES = [shape for dims in range(4) for shape in product((0, 1, 2, 3), repeat=dims)] + [
    (2, 1, 3, 2),
    (2, 2, 2, 2),
]


@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_the_regions_of_every_range_are_the_range_in_order(shape: tuple[int, ...]) -> None:
    numel, whole = prod(shape), torch.arange(prod(shape)).view(shape)
    for start in range(numel + 1):
        for end in range(start, numel + 1):
            found = regions(shape, start, end - start)
            assert [i for region in found for i in whole[region.index].flatten().tolist()] == [*range(start, end)]
            assert len(found) <= max(2 * len(shape) - 1, 1)
            assert all(region.numel == prod(region.sizes) > 0 for region in found)
