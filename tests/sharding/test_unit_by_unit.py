"""Whole parameters with one unit in memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.layout.layout import as_stored
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward, two_layers
from tests.support.ranks import HYBRID, Ranks, gloo
from tests.support.refusals import refused

every_mesh = pytest.mark.parametrize("axes", [{"shard": 5}, {"replicate": 2, "shard": 3}], ids=str)
every_real = pytest.mark.parametrize("ranks", gloo(2, HYBRID), ids=str)


def sharded(mesh: fs.Mesh, **options: Any) -> fs.Sharded:
    model = awkward()
    return fs.shard(model, fs.plan(model, mesh, **options))


@every_mesh
def test_an_iteration_has_the_tensors_of_a_gather(axes: dict[str, int]) -> None:
    params = sharded(fs.simulated_mesh(axes), precision=fs.MixedPrecision(torch.bfloat16))
    stored = fs.Sharded(dict(params), as_stored(params.layout))
    for dtype in (None, torch.bfloat16):
        expected = fs.gather(stored, lazy=False, dtype=dtype)
        assert_trees_close(dict(fs.iter_parameters(params, dtype=dtype)), dict(expected), rtol=0, atol=0)


def iterated(mesh: fs.Mesh) -> Any:
    """What this rank keeps if one of them keeps the parameters, and what is sent for it."""
    params = sharded(mesh)
    with count_collectives() as seen:
        kept = {name: x for name, x in fs.iter_parameters(params) if mesh.rank == 1}
    return kept, dict(seen.by_kind)


@every_real
def test_one_rank_has_the_whole_parameters_and_every_buffer_is_gathered_once(ranks: Ranks) -> None:
    expected = {name: p.detach() for name, p in awkward().named_parameters()}
    buffers = fs.plan(awkward(), fs.simulated_mesh(2)).buffers
    for rank, (kept, seen) in enumerate(ranks.run(iterated)):
        assert_trees_close(kept, expected if rank == 1 else {}, rtol=0, atol=0)
        assert seen == {"all_gather": len(buffers)}


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
        assert "iter_parameters: 2 problems" in refused(fs.iter_parameters, cut)
        assert "got Full, expected a Sharded; it is whole already" in refused(fs.iter_parameters, fs.gather(params))
        assert "iter_parameters: dtype: got torch.int8" in refused(fs.iter_parameters, params, dtype=torch.int8)
    assert seen.total == 0
