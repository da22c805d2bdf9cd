"""What a step does not use has the same gradients on gloo ranks as on simulated ones: zeros."""

from __future__ import annotations

from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.pool import run_ranks
from tests.training.test_unused_parameters import (
    assert_unused_is_zeros_and_none_is_left_alone,
    assert_what_some_ranks_use_is_the_mean_with_zeros,
)


def on_this_rank() -> list[dict[str, Tensor]]:
    mesh = fs.init_mesh()
    unused = assert_unused_is_zeros_and_none_is_left_alone(mesh)
    return [dict(unused), dict(assert_what_some_ranks_use_is_the_mean_with_zeros(mesh))]


def test_gloo_ranks_agree_with_simulated_ones_about_what_is_not_used() -> None:
    mesh = fs.simulated_mesh(3)
    simulated = [
        assert_unused_is_zeros_and_none_is_left_alone(mesh),
        assert_what_some_ranks_use_is_the_mean_with_zeros(mesh),
    ]
    for rank, trees in enumerate(run_ranks(on_this_rank, 3)):
        expected = [{key: x[rank] for key, x in tree.items()} for tree in simulated]
        assert_trees_close(trees, expected, rtol=1e-13, atol=1e-15)
