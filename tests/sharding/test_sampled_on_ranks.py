"""The same samples on real gloo ranks."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.pool import run_ranks
from tests.support.sampling import Sample, samples


def on_this_rank(batch: list[Sample]) -> list[Any]:
    mesh, results = fs.init_mesh(), []
    for sample in batch:
        mine: Any = optree.tree_map(lambda x: x[mesh.rank], sample.rows())
        results.append(optree.tree_map(lambda x: torch.zeros_like(x) + x, sample.on_rank(mesh["shard"], mine)))
    return results


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sampled_collectives_equal_a_loop_over_ranks(num_ranks: int) -> None:
    batch = list(samples(num_ranks, 60))
    results = run_ranks(on_this_rank, num_ranks, batch)
    for i, sample in enumerate(batch):
        actual: Any = optree.tree_map(lambda *leaves: torch.stack(leaves), *(result[i] for result in results))
        assert_trees_close({str(sample): actual}, {str(sample): sample.expected(sample.rows())})
