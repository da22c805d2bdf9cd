"""Whole parameters with one unit in memory: iterated over, or gathered for one rank only."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import functorch_shard as fs
from functorch_shard.layout.layout import as_stored
from functorch_shard.sharding import gather
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward, two_layers
from tests.support.ranks import HYBRID, Ranks, gloo
from tests.support.refusals import refused

every_mesh = pytest.mark.parametrize("axes", [{"shard": 5}, {"replicate": 2, "shard": 3}], ids=str)
every_real = pytest.mark.parametrize("ranks", gloo(2, HYBRID), ids=str)
UNITS = 4


def sharded(mesh: fs.Mesh, **options: Any) -> fs.Sharded:
    model = awkward()
    return fs.shard(model, fs.plan(model, mesh, **options))


@every_mesh
def test_both_have_the_tensors_of_a_gather(axes: dict[str, int]) -> None:
    params = sharded(fs.simulated_mesh(axes), precision=fs.MixedPrecision(torch.bfloat16))
    for dtype in (None, torch.float64):
        full = fs.gather(*fs.partition(params), rank=params.layout.mesh.size - 1, dtype=dtype)
        assert full is not None
        assert list(full) == list(params.layout.slots)
        assert_trees_close(dict(full), dict(fs.gather(params, dtype=dtype)), rtol=0, atol=0)
    stored = fs.Sharded(dict(params), as_stored(params.layout))
    for dtype in (None, torch.bfloat16):
        expected = fs.gather(stored, lazy=False, dtype=dtype)
        assert_trees_close(dict(fs.iter_parameters(params, dtype=dtype)), dict(expected), rtol=0, atol=0)


def gathered(mesh: fs.Mesh) -> Any:
    """What this rank gets for each, what it iterates over, and what is sent for one."""
    params = sharded(mesh)
    full = [fs.gather(params, rank=rank) for rank in range(mesh.size)]
    with count_collectives() as seen:
        fs.gather(params, rank=1)
    return full, dict(fs.iter_parameters(params)), dict(seen.by_kind)


@every_real
def test_one_rank_has_the_whole_parameters_and_every_buffer_is_gathered_once(ranks: Ranks) -> None:
    expected = {name: p.detach() for name, p in awkward().named_parameters()}
    buffers = fs.plan(awkward(), fs.simulated_mesh(2)).buffers
    for rank, (full, iterated, seen) in enumerate(ranks.run(gathered)):
        assert [x is not None for x in full] == [wanted == rank for wanted in range(ranks.size)]
        assert_trees_close(dict(full[rank] or {}), expected, rtol=0, atol=0)
        assert_trees_close(iterated, expected, rtol=0, atol=0)
        assert seen == {"all_gather": len(buffers)}


def alive_before_each_gather(mesh: fs.Mesh) -> list[list[str]]:
    """Which whole parameters of this process are still there whenever the next unit is about to be gathered."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(UNITS)))
    params = fs.shard(model, fs.plan(model, mesh))
    made: dict[str, weakref.ref[Any]] = {}
    alive: list[list[str]] = []

    def watched(*args: Any) -> fs.Full:
        alive.append([name for name, x in made.items() if x() is not None])
        part = gather_at_once(*args)
        made.update({name: weakref.ref(x) for name, x in part.items()})
        return part

    gather_at_once = gather._gather
    gc.disable()  # what goes, goes by itself
    with patch.object(gather, "_gather", watched):
        fs.gather(params, rank=1)
    gc.enable()
    return alive


def test_the_others_have_one_unit_in_memory_at_a_time() -> None:
    names = [[f"{i}.weight", f"{i}.bias"] for i in range(UNITS)]
    before = [[name for unit in names[:i] for name in unit] for i in range(UNITS)]
    (ranks,) = gloo(2)
    assert ranks.run(alive_before_each_gather) == [[[]] * UNITS, before]


def test_an_iteration_has_one_unit_in_memory_and_each_tensor_stays_valid() -> None:
    params = sharded(fs.simulated_mesh(2))
    alive: list[tuple[int, weakref.ref[Any]]] = []
    unit_of = {slot.name: i for i, unit in enumerate(params.layout.units) for b in unit.buffers for slot in b.slots}
    for name, x in fs.iter_parameters(params):
        alive = [(unit, ref) for unit, ref in alive if ref() is not None]
        assert {unit for unit, _ in alive} <= {unit_of[name], unit_of[name] - 1}
        alive.append((unit_of[name], weakref.ref(x)))
        del x
    pairs = [(x, x.clone()) for _, x in fs.iter_parameters(params)]
    assert all(torch.equal(x, copy) for x, copy in pairs)


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    model = two_layers()
    params: Any = fs.shard(model, fs.plan(model, fs.simulated_mesh(2)))
    cut = fs.Sharded({key: x[:, 1:] for key, x in params.items()}, params.layout)
    with count_collectives() as seen:
        for rank in (2, -1, True):
            assert f"gather: rank: got {rank}, expected an int from 0 to 1" in refused(fs.gather, params, rank=rank)
        assert "gather: 2 problems" in refused(fs.gather, cut, rank=0)
        assert "iter_parameters: 2 problems" in refused(fs.iter_parameters, cut)
        assert "got Full, expected a Sharded; it is whole already" in refused(fs.iter_parameters, fs.gather(params))
        assert "iter_parameters: dtype: got torch.int8" in refused(fs.iter_parameters, params, dtype=torch.int8)
        in_spmd = params.layout.mesh.spmd(lambda p: fs.gather(p, rank=0))
        assert "Call it outside, on the stacked tree" in refused(in_spmd, params)
    assert seen.total == 0
