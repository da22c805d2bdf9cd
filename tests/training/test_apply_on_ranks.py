"""BatchNorm on gloo ranks: the parameters, statistics and losses of simulated ranks, and of a loop."""

from __future__ import annotations

import pytest

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.pool import run_ranks
from tests.training.test_apply import Values, normalized, train, train_in_a_loop, untouched

CASES = [(momentum, sync) for momentum in (0.1, None) for sync in (True, False)]


def train_on_this_rank() -> list[tuple[fs.Full, Values, list[float]]]:
    mesh, results = fs.init_mesh(), []
    for momentum, sync in CASES:
        model = normalized(momentum=momentum)
        with untouched(model):
            results.append(train(mesh, model, sync))
    return results


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_real_ranks_train_as_a_loop_over_ranks(num_ranks: int) -> None:
    results = run_ranks(train_on_this_rank, num_ranks)
    for i, (momentum, sync) in enumerate(CASES):
        params, ranks, losses = train_in_a_loop(num_ranks, normalized(momentum=momentum), sync)
        for rank, result in enumerate(results):
            actual, buffers, actual_losses = result[i]
            assert_trees_close(dict(actual), params, rtol=1e-10, atol=1e-10)
            assert_trees_close(buffers, ranks[rank], rtol=1e-10, atol=1e-10)
            assert actual_losses == pytest.approx(losses, abs=1e-10)
