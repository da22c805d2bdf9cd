"""Accumulation on gloo ranks, where ranks with unequal numbers of tokens compute with tensors of unequal shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.accumulation import AXES, WAYS, all_tokens_at_once, big_batch, weighted_by_tokens
from tests.support.pool import run_ranks
from tests.training.test_accumulation import assert_reductions

every_way = pytest.mark.parametrize("way", WAYS)


def accumulate_on_this_rank(axes: dict[str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    mesh = fs.init_mesh(axes)
    return {
        way: (run(mesh), weighted_by_tokens(mesh, way), weighted_by_tokens(mesh, way, cut=True))
        for way, run in WAYS.items()
    }


@pytest.fixture(scope="module", params=AXES, ids=str)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(accumulate_on_this_rank, fs.simulated_mesh(request.param).size, request.param)


@every_way
def test_accumulated_gradients_are_those_of_the_big_batch(results: list[dict[str, Any]], way: str) -> None:
    for result in results:
        grads, counters, layout = result[way][0]
        assert_trees_close(grads, big_batch(len(results)), rtol=1e-10, atol=1e-12)
        assert_reductions(counters, layout, way)


@every_way
def test_losses_weighted_by_tokens_are_those_of_a_single_process(results: list[dict[str, Any]], way: str) -> None:
    expected = all_tokens_at_once(len(results))
    for result in results:
        _, masked, cut = result[way]
        for actual in (masked, cut):
            assert_trees_close(actual, expected, rtol=1e-10, atol=1e-12)
