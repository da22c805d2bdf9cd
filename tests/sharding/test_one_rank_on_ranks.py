"""Whole parameters on one gloo rank: its values, what is sent, and what the others have in memory meanwhile."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import functorch_shard as fs
from functorch_shard.sharding import one_rank
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward
from tests.support.pool import run_ranks

AXES: list[dict[str, int]] = [{"shard": 2}, {"replicate": 2, "shard": 2}]
UNITS = 4


def gathered_on_this_rank(axes: dict[str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    mesh, model = fs.init_mesh(axes), awkward()
    params = fs.shard(model, fs.plan(model, mesh))
    full = {rank: fs.gather_to(params, rank) for rank in range(mesh.size)}
    with count_collectives() as seen:
        fs.gather_to(params, 1, device="cpu")
    return {"full": full, "seen": dict(seen.by_kind), "alive": alive_before_each_gather(mesh)}


def alive_before_each_gather(mesh: fs.Mesh) -> list[list[str]]:
    """Which whole parameters of this process are still there whenever the next unit is about to be gathered."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(UNITS)))
    params = fs.shard(model, fs.plan(model, mesh))
    gathered: dict[str, weakref.ref[Any]] = {}
    alive: list[list[str]] = []
    gather = one_rank.gather

    def watched(*args: Any, **options: Any) -> fs.Full:
        alive.append([name for name, x in gathered.items() if x() is not None])
        part = gather(*args, **options)
        gathered.update({name: weakref.ref(x) for name, x in part.items()})
        return part

    gc.disable()  # what goes, goes by itself
    one_rank.gather = watched
    fs.gather_to(params, 1)
    one_rank.gather = gather
    return alive


@pytest.fixture(scope="module", params=AXES, ids=str)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(gathered_on_this_rank, fs.simulated_mesh(request.param).size, request.param)


def test_one_rank_has_the_whole_parameters_and_the_others_none(results: list[dict[str, Any]]) -> None:
    expected = {name: p.detach() for name, p in awkward().named_parameters()}
    for rank, result in enumerate(results):
        for wanted, full in result["full"].items():
            assert (full is not None) == (wanted == rank)
        assert_trees_close(dict(result["full"][rank]), expected, rtol=0, atol=0)


def test_each_buffer_is_gathered_once(results: list[dict[str, Any]]) -> None:
    model = awkward()
    buffers = fs.plan(model, fs.simulated_mesh(2)).buffers
    assert [result["seen"] for result in results] == [{"all_gather": len(buffers)}] * len(results)


def test_the_others_have_one_unit_in_memory_at_a_time(results: list[dict[str, Any]]) -> None:
    names = [[f"{i}.weight", f"{i}.bias"] for i in range(UNITS)]
    for rank, result in enumerate(results):
        before = [[name for unit in names[:i] for name in unit] for i in range(UNITS)]
        assert result["alive"] == (before if rank == 1 else [[]] * UNITS)
