"""shard from the values of one rank: bitwise those, whatever the others hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward, two_layers
from tests.support.refusals import refused

AXES: list[dict[str, int]] = [
    {"shard": 1},
    {"shard": 2},
    {"shard": 5},
    {"replicate": 2, "shard": 3},
    {"shard": 3, "replicate": 2},
    {"replicate": 3},
]
OPTIONS: list[dict[str, Any]] = [{}, {"ignored": ["blocks.0", "steps"]}, {"units": 1, "align_bytes": 0}]


def values_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_outside_spmd_the_one_process_has_the_values_of_every_rank(axes: dict[str, int], options: Any) -> None:
    mesh = fs.simulated_mesh(axes)
    layout = fs.plan(awkward(), mesh, **options)
    for rank in range(mesh.size):
        assert_trees_close(fs.shard(awkward(), layout, from_rank=rank), fs.shard(awkward(), layout), rtol=0, atol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_inside_spmd_the_values_of_one_rank_are_taken_for_all_bitwise(axes: dict[str, int], options: Any) -> None:
    mesh = fs.simulated_mesh(axes)
    layout = fs.plan(awkward(), mesh, **options)
    for rank in range(mesh.size):
        right = values_of(awkward(rank))
        right["scale"] = torch.tensor(-0.0).double()  # which a sum with zeros would lose
        right["inp.bias"] = torch.full((7,), torch.inf).double()
        garbage = {n: torch.full_like(x, torch.nan) if x.is_floating_point() else ~x for n, x in right.items()}
        rows = {
            name: torch.stack([right[name] if r == rank else x for r in range(mesh.size)])
            for name, x in garbage.items()
        }
        stacked = {name: x.unflatten(0, tuple(axes.values())) for name, x in rows.items()}
        taken = mesh.spmd(lambda source, rank=rank: fs.shard(source, layout, from_rank=rank))(stacked)
        expected = fs.shard(right, layout)
        for key, x in expected.items():
            assert torch.equal(as_bytes(taken[key]), as_bytes(x)), key


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def test_values_that_are_the_same_on_every_rank_need_no_rank_dims() -> None:
    mesh, model = fs.simulated_mesh({"replicate": 2, "shard": 2}), awkward()
    layout = fs.plan(model, mesh)
    inside = mesh.spmd(lambda: fs.shard(model, layout, from_rank=3))()
    assert_trees_close(inside, fs.shard(model, layout), rtol=0, atol=0)


def test_each_vmap_of_ones_own_is_left_as_it_is() -> None:
    mesh = fs.simulated_mesh(3)
    layout = fs.plan({"w": torch.zeros(4)}, mesh, align_bytes=0)
    x = torch.arange(24.0).view(3, 2, 4)  # (ranks, models, elements)
    ensemble = mesh.spmd(lambda x: torch.vmap(lambda w: fs.shard({"w": w}, layout, from_rank=1)["(root)"])(x))(x)
    assert ensemble.shape == (3, 2, 2)
    assert torch.equal(ensemble.transpose(0, 1).flatten(1)[:, :4], x[1])


def test_a_scatter_and_a_broadcast_are_counted_by_what_a_rank_receives() -> None:
    mesh, model = fs.simulated_mesh({"replicate": 2, "shard": 3}), two_layers()
    layout = fs.plan(model, mesh, ignored=["2"])
    with count_collectives() as seen:
        mesh.spmd(lambda: fs.shard(model, layout, from_rank=4))()
    sharded, kept = (layout.buffers[key] for key in ("0", "2/whole"))
    assert seen.by_kind == {"scatter": 1, "broadcast": 3}
    assert seen.nbytes("scatter") == 4 * sharded.shard_numel
    assert seen.nbytes("broadcast") == 4 * (sharded.shard_numel + 2 * kept.numel)


def test_a_rank_that_is_none_is_refused() -> None:
    mesh = fs.simulated_mesh({"replicate": 2, "shard": 3})
    layout = fs.plan(two_layers(), mesh)
    for rank in (-1, 6):
        text = refused(fs.shard, two_layers(), layout, from_rank=rank)
        assert f"shard: from_rank: got {rank}, expected 0 <= from_rank < 6" in text
    for wrong in ("0", True, 0.0, torch.tensor(1)):
        assert "TypeError: shard: from_rank: got" in refused(fs.shard, two_layers(), layout, from_rank=wrong)
    assert "source: got NoneType" in refused(fs.shard, None, layout, from_rank=0)
    assert "source: got NoneType" in refused(fs.shard, None, layout)


def test_the_source_is_checked_as_without() -> None:
    layout = fs.plan(awkward(), fs.simulated_mesh(2))
    assert "missing" in refused(fs.shard, {"scale": torch.ones(())}, layout, from_rank=1)
    with torch.device("meta"):
        model = awkward()
    assert "on the meta device, without values" in refused(fs.shard, model, layout, from_rank=1)
