"""init_params on real gloo ranks: the shards of simulated ones, one unit in memory, and errors on all or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, run_ranks
from tests.sharding.test_initialization import UNIT, UNITS, WIDTH, Model, on_meta
from tests.support.live_bytes import LiveBytes
from tests.support.refusals import text_of


def initialised_on_this_rank(axes: dict[str, int]) -> tuple[fs.Sharded, dict[str, Tensor], list[str]]:
    mesh, model = fs.init_mesh(axes), on_meta(Model)
    layout = fs.plan(model, mesh, units=500)
    state = torch.get_rng_state()
    params, buffers = fs.init_params(model, layout, seed=3), fs.init_buffers(model, layout, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    broken: Any = on_meta(Model)
    nothing: Any = None
    if mesh.rank == 1:
        broken.layers[0].norm1.reset_parameters = lambda: None
    told = [
        text_of(lambda: fs.init_params(broken, layout)),
        text_of(lambda: fs.init_params(model, layout, seed=mesh.rank)),
        text_of(lambda: fs.init_params(nothing if mesh.rank else model, layout)),
    ]
    dist.barrier()
    return params, buffers, told


@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2}], ids=str)
def test_init_params_on_real_ranks_is_that_of_simulated_ones_and_fails_on_all_or_none(axes: dict[str, int]) -> None:
    model, mesh = on_meta(Model), fs.simulated_mesh(axes)
    layout = fs.plan(model, mesh, units=500)
    expected, buffers = fs.init_params(model, layout, seed=3), fs.init_buffers(model, layout, seed=3)
    results = run_ranks(initialised_on_this_rank, 2, axes)
    for rank, (params, real_buffers, _) in enumerate(results):
        assert_trees_close(dict(params), {key: x[rank] for key, x in expected.items()}, rtol=0, atol=0)
        assert_trees_close(real_buffers, {name: x[rank] for name, x in buffers.items()}, rtol=0, atol=0)
    (*_, first), (*_, second) = results
    assert "'layers.0.norm1.weight': reset_parameters of LayerNorm 'layers.0.norm1' left 8 of 8" in second[0]
    assert first[0].startswith("RuntimeError: init_params failed on rank 1, so no rank can go on. There:\nValueError")
    assert first[1] == second[1]
    assert "rank 1: seed=1" in first[1]
    assert second[2].startswith("TypeError: init_params: model: got NoneType")
    assert "failed on rank 1" in first[2]


def memory_on_this_rank() -> LiveBytes:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))))
    layout = fs.plan(model, fs.init_mesh())
    with LiveBytes() as live:
        live.mark("start")
        params = fs.init_params(model, layout)
        live.mark("end")
    assert len(params) == UNITS
    return live


def test_a_rank_holds_its_shards_and_one_unit() -> None:
    for live in run_ranks(memory_on_this_rank, 2):
        shards = UNITS * UNIT // 2
        assert shards <= live.growth("start", "end") < shards + UNIT + 20_000  # the state of the random numbers, twice
