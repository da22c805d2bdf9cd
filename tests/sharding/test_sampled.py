"""Sampled trees, shapes, dtypes, rank counts and transforms against a loop over ranks."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import Ranks, gloo, rows_of, sequential, simulated
from tests.support.sampling import samples


def sampled(mesh: fs.Mesh) -> list[Any]:
    every = [(sample, rows_of(mesh, sample.rows())) for sample in samples(mesh.size, 60)]
    return [mesh.spmd(lambda x, sample=sample: sample.on_rank(mesh["shard"], x))(mine) for sample, mine in every]


@pytest.mark.parametrize("ranks", [*simulated(1, 2, 3, 5, 8), *sequential(3), *gloo(2, 3)], ids=str)
def test_sampled_collectives_equal_a_loop_over_ranks(ranks: Ranks) -> None:
    results: Any = optree.tree_map(lambda *rows: torch.stack(rows), *ranks.run(sampled))
    for sample, actual in zip(samples(ranks.size, 60), results, strict=True):
        assert_trees_close({str(sample): actual}, {str(sample): sample.expected(sample.rows())})
