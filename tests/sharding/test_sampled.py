"""Sampled trees, shapes, dtypes, rank counts and transforms against a loop over ranks, on simulated ranks."""

from __future__ import annotations

import pytest

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.sampling import Sample, samples

SAMPLES = [sample for num_ranks in (1, 2, 3, 5, 8) for sample in samples(num_ranks, 60)]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_sampled_collectives_equal_a_loop_over_ranks(sample: Sample) -> None:
    mesh, rows = fs.simulated_mesh(sample.num_ranks), sample.rows()
    actual = mesh.spmd(lambda x: sample.on_rank(mesh["shard"], x))(rows)
    assert_trees_close(actual, sample.expected(rows))
