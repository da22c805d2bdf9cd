"""Whole parameters as a stream: names first, one unit in memory, and every tensor valid for good."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward
from tests.support.pool import run_ranks
from tests.support.refusals import refused

MESHES: list[Any] = [1, 3, {"replicate": 2, "shard": 2}]


def sharded(mesh: fs.Mesh, **options: Any) -> fs.Sharded:
    model = awkward()
    return fs.shard(model, fs.plan(model, mesh, **options))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_stream_has_the_tensors_of_a_gather_and_says_so_before(mesh: Any, dtype: torch.dtype | None) -> None:
    params = sharded(fs.simulated_mesh(mesh), precision=fs.MixedPrecision(param_dtype=torch.float16))
    weights, stored = fs.stream(params, dtype=dtype), params.layout.as_stored()
    names, shapes, dtypes = list(weights.shapes), weights.shapes, weights.dtypes
    seen = dict(weights)
    assert list(seen) == names
    assert len(weights) == len(names)
    assert {name: tuple(x.shape) for name, x in seen.items()} == shapes
    assert {name: x.dtype for name, x in seen.items()} == dtypes
    expected = fs.gather(fs.Sharded(params, stored), lazy=False, dtype=dtype)
    assert_trees_close(seen, dict(expected), rtol=0, atol=0)
    assert_trees_close(dict(weights), seen, rtol=0, atol=0)  # iterated again
    assert weights.aliases == {"blocks.1.fc.weight": "blocks.0.fc.weight"}


def test_a_tensor_stays_as_it_is_after_the_next_ones_were_asked_for() -> None:
    kept, copies = [], []
    for _, x in fs.stream(sharded(fs.simulated_mesh(2))):
        kept.append(x)
        copies.append(x.clone())
    assert all(torch.equal(x, copy) for x, copy in zip(kept, copies, strict=True))


def test_one_unit_is_in_memory() -> None:
    params = sharded(fs.simulated_mesh(2))
    alive: list[tuple[int, weakref.ref[Any]]] = []
    unit_of = {slot.name: i for i, unit in enumerate(params.layout.units) for b in unit.buffers for slot in b.slots}
    for name, x in fs.stream(params):
        alive = [(unit, ref) for unit, ref in alive if ref() is not None]
        assert {unit for unit, _ in alive} <= {unit_of[name], unit_of[name] - 1}
        alive.append((unit_of[name], weakref.ref(x)))
        del x


def test_a_stream_costs_the_collectives_of_one_gather() -> None:
    mesh = fs.simulated_mesh(2)
    params = sharded(mesh)

    def collectives(run: Any) -> list[Any]:
        with count_collectives() as counted:
            mesh.spmd(run)(params)
        return sorted((one.kind, one.axis, one.numel) for one in counted.issued)

    streamed = collectives(lambda params: dict(fs.stream(params)))
    assert streamed == collectives(lambda params: dict(fs.gather(params, lazy=False)))
    assert streamed


def on_this_rank() -> dict[str, Tensor]:
    return dict(fs.stream(sharded(fs.init_mesh()), dtype=torch.float32))


def test_gloo_ranks_stream_the_same_tensors() -> None:
    expected = dict(fs.stream(sharded(fs.simulated_mesh(2)), dtype=torch.float32))
    for streamed in run_ranks(on_this_rank, 2):
        assert_trees_close(streamed, expected, rtol=0, atol=0)


def test_what_cannot_be_streamed_is_refused() -> None:
    params = sharded(fs.simulated_mesh(2))
    assert "stream: got Full, expected a Sharded; it is whole already" in refused(fs.stream, fs.gather(params))
    assert "stream: dtype: got torch.int8" in refused(fs.stream, params, dtype=torch.int8)
