"""The strategies of FSDP on four gloo ranks: the gradients, and every collective of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import count_collectives
from tests.sharding.test_strategies import (
    assert_full_precision_is_forced,
    assert_gradients,
    assert_volatile,
    assert_written_back,
    half,
    no_sync,
    once,
    reductions,
    step,
    traffic,
)
from tests.support.pool import run_ranks

STRATEGIES: dict[str, tuple[dict[str, int], bool]] = {
    "FULL_SHARD": ({"shard": 4}, True),
    "SHARD_GRAD_OP": ({"shard": 4}, False),
    "NO_SHARD": ({"replicate": 4}, True),
    "HYBRID_SHARD": ({"replicate": 2, "shard": 2}, True),
    "HYBRID_SHARD, shards outermost": ({"shard": 2, "replicate": 2}, True),
    "_HYBRID_SHARD_ZERO2": ({"replicate": 2, "shard": 2}, False),
    "_HYBRID_SHARD_ZERO2, shards outermost": ({"shard": 2, "replicate": 2}, False),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
NUM_UNITS = 5


def equal_units() -> nn.Sequential:
    """Of nearly one size, so that none is small beside the others; no two of the same, so that sizes tell units."""
    torch.manual_seed(0)
    sizes = [5, *(13 + i for i in range(NUM_UNITS - 1)), 5]
    units = [nn.Sequential(nn.Linear(5, n), nn.Tanh(), nn.Linear(n, 5)) for n in sizes[1:-1]]
    return nn.Sequential(nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 5)), *units).double()


def traffic_on_this_rank(mesh: fs.Mesh, reshard: bool) -> list[tuple[str, str, int]]:
    """Kind, axis and unit of every collective of one step, in order."""
    model = equal_units()
    layout = fs.plan(model, mesh, reshard_after_forward=reshard)
    params, x = fs.shard(model, layout), torch.randn(3, 5, dtype=torch.float64)
    with count_collectives() as seen:
        fs.grad(lambda p: functional_call(model, fs.gather(p), (x,)).square().sum())(params)
    units = {n * 8: int(b.key) for b in layout.buffers.values() for n in (b.numel, b.shard_numel)}
    assert len(units) == NUM_UNITS * (2 if layout.num_shards > 1 else 1)
    return [(one.kind, one.axis, units[one.nbytes]) for one in seen.issued]


def train_on_this_rank() -> dict[str, Any]:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for strategy, (axes, reshard) in STRATEGIES.items():
        mesh = fs.init_mesh(axes)
        grads, seen, trained, frozen = step(mesh, reshard_after_forward=reshard)
        results[strategy] = grads, seen, trained, frozen, no_sync(mesh), traffic_on_this_rank(mesh, reshard)
        for check in (assert_full_precision_is_forced, assert_written_back, assert_volatile):
            check(half(mesh))
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(train_on_this_rank, 4)


@every_strategy
def test_gradients_are_those_of_the_unsharded_model_on_every_rank(strategy: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        grads, *_ = result[strategy]
        assert_gradients(grads, 4)


@every_strategy
def test_every_buffer_is_reduced_once_inside_and_its_shard_all_reduced_across(
    strategy: str, results: list[dict[str, Any]]
) -> None:
    for result in results:
        _, seen, trained, frozen, *_ = result[strategy]
        reduced = {one: count for one, count in traffic(seen).items() if one[0] != "all_gather"}
        assert reduced == reductions(trained)
        gathered = {one: count for one, count in traffic(seen).items() if one[0] == "all_gather"}
        shards = once("all_gather", "shard", trained, shards=True) + once("all_gather", "shard", frozen, shards=True)
        axes, reshard = STRATEGIES[strategy]
        assert gathered.keys() == (shards.keys() if "shard" in axes else set())
        if "shard" in axes and not reshard:
            assert gathered == shards


@every_strategy
def test_units_are_gathered_again_in_backward_only_by_those_that_reshard(
    strategy: str, results: list[dict[str, Any]]
) -> None:
    axes, reshard = STRATEGIES[strategy]
    forward, backward = list(range(NUM_UNITS)), list(range(NUM_UNITS))[::-1]
    for result in results:
        issued = result[strategy][-1]
        units = lambda kind, axis: [unit for one, where, unit in issued if (one, where) == (kind, axis)]  # noqa: E731, B023
        assert units("all_gather", "shard") == (forward + [2, 1, 0] * reshard if "shard" in axes else [])
        assert units("psum_scatter", "shard") == (backward if "shard" in axes else [])
        assert sorted(units("psum", "replicate")) == (forward if "replicate" in axes else [])
        assert len(issued) == sum(len(units(*key)) for key in {one[:2] for one in issued})


@every_strategy
def test_no_sync_is_adding_full_gradients_before_one_scatter_grads(
    strategy: str, results: list[dict[str, Any]]
) -> None:
    for result in results:
        grads, before, reducing, trained = result[strategy][4]
        assert_gradients(grads, 4)
        assert set(before.by_kind) <= {"all_gather"}
        assert traffic(reducing) == reductions(trained)


def test_simulated_ranks_have_the_same_gradients(results: list[dict[str, Any]]) -> None:
    for strategy, (axes, reshard) in STRATEGIES.items():
        simulated: dict[str, Tensor] = step(fs.simulated_mesh(axes), reshard_after_forward=reshard)[0]
        for name, grad in results[0][strategy][0].items():
            torch.testing.assert_close(grad, simulated[name], rtol=1e-12, atol=1e-14)
