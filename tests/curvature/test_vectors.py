"""Trees as vectors: inner products of the whole, and random numbers that know nothing of ranks, units or labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import vmap

import functorch_shard as fs
from functorch_shard.curvature.vectors import normal
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.ranks import gloo, on_each
from tests.support.refusals import refused

MESHES: list[Any] = [1, 2, 3, 5, 8, {"replicate": 2, "shard": 3}, {"replicate": 4}]
OPTIONS: list[dict[str, Any]] = [{}, {"units": 1 << 20}, {"labels": lambda name, _: name[-1]}, {"align_bytes": 0}]
SHAPES = {"a.w": (5, 3), "a.b": (7,), "b.w": (2, 3, 4), "b.scale": (), "b.none": (0, 4), "c.w": (11,)}


def values(dtype: torch.dtype = torch.float64, start: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(start)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def sharded(mesh: Any, dtype: torch.dtype = torch.float64, start: int = 0, **options: Any) -> fs.Sharded:
    whole = values(dtype, start)
    return fs.shard(whole, fs.plan(whole, fs.simulated_mesh(mesh), **options))


def flat(tree: fs.Sharded) -> Tensor:
    full = fs.gather(tree, lazy=False)
    return torch.cat([full[name].reshape(-1) for name in SHAPES])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_vdot_is_that_of_the_whole_tensors(mesh: Any, dtype: torch.dtype) -> None:
    a, b = sharded(mesh, dtype, 1), sharded(mesh, dtype, 2)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.vdot(flat(a).to(wide), flat(b).to(wide))
    tolerance = 1e-12 if dtype in (torch.float64, torch.complex128) else 1e-5
    torch.testing.assert_close(fs.curvature.vdot(a, b).to(wide), expected, rtol=tolerance, atol=tolerance)
    inside = a.layout.mesh.spmd(fs.curvature.vdot)(a, b)
    assert inside.shape == tuple(a.layout.mesh.axes.values())
    assert (inside == fs.curvature.vdot(a, b)).all()


def test_vdot_does_not_count_padding_or_what_is_not_there() -> None:
    a = sharded(5)
    spoiled = fs.Sharded({key: torch.where(x == 0, float("nan"), x) for key, x in a.items()}, a.layout)
    for trees in ((spoiled, a), (a, spoiled)):
        torch.testing.assert_close(fs.curvature.vdot(*trees), fs.curvature.vdot(a, a), rtol=0, atol=0)
    absent = fs.Sharded({key: None if key.startswith("a") else x for key, x in a.items()}, a.layout)
    assert fs.curvature.vdot(absent, a) < fs.curvature.vdot(a, a)
    assert fs.curvature.vdot(absent, a) == fs.curvature.vdot(absent, absent)


def test_vdot_costs_one_psum_of_a_number() -> None:
    a = sharded({"replicate": 2, "shard": 3})
    with count_collectives() as counted:
        a.layout.mesh.spmd(fs.curvature.vdot)(a, a)
    assert [(one.kind, one.axis, one.numel) for one in counted.issued] == [("psum", "shard", 1)]


@pytest.mark.parametrize("mesh", [2, 3, {"replicate": 2, "shard": 2}], ids=str)
def test_the_gradient_of_vdot_is_that_of_the_whole(mesh: Any) -> None:
    a, b = sharded(mesh, start=1), sharded(mesh, start=2)
    run = a.layout.mesh.spmd(fs.grad(lambda a, b: fs.curvature.vdot(a, b) + 0.5 * fs.curvature.vdot(a, a)))
    assert_trees_close(flat(run(a, b)), flat(a) + flat(b), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_random_trees_are_bitwise_the_same_for_any_ranks_and_units(dtype: torch.dtype) -> None:
    draw = fs.curvature.randn_like
    expected = flat(draw(sharded(1, dtype), 3))
    assert len(set(expected.tolist())) > 1
    for mesh in MESHES:
        for options in OPTIONS:
            tree = draw(sharded(mesh, dtype, **options), 3)
            assert torch.equal(flat(tree), expected), (mesh, options)
            inside = tree.layout.mesh.spmd(lambda tree: draw(tree, 3))(tree)
            assert torch.equal(flat(inside), expected), (mesh, options)


@on_each(gloo(2, 3, {"replicate": 2, "shard": 2}))
def test_gloo_ranks_draw_what_simulated_ranks_draw(mesh: fs.Mesh) -> None:
    whole, one = values(torch.float32), sharded(1, torch.float32)
    params = fs.shard(whole, fs.plan(whole, mesh))
    drawn, expected = (fs.curvature.randn_like(tree, 3) for tree in (params, one))
    assert torch.equal(flat(drawn), flat(expected))
    found = fs.curvature.vdot(drawn, params)
    torch.testing.assert_close(found, fs.curvature.vdot(expected, one), rtol=1e-6, atol=1e-6)


@on_each(gloo({"shard": 2, "tensor": 2}))
def test_dtensors_get_the_numbers_of_the_whole_and_count_once(mesh: fs.Mesh) -> None:
    """A matrix that is cut by rows, one by columns, a copy and a plain tensor."""
    axes: Any = mesh.device_mesh
    cuts = {"a.w": Shard(0), "b.w": Shard(1), "c.w": Replicate()}
    whole = {
        name: distribute_tensor(x, axes["tensor"], [cuts[name]]) if name in cuts else x for name, x in values().items()
    }
    params = fs.shard(whole, fs.plan(whole, fs.Mesh.from_device_mesh(axes["shard"])))
    drawn, expected = fs.curvature.randn_like(params, 3), flat(fs.curvature.randn_like(sharded(1), 3))
    full: Any = fs.gather(drawn, lazy=False)
    parts = [x.full_tensor() if isinstance(x := full[name], DTensor) else x for name in SHAPES]
    assert torch.equal(torch.cat([x.reshape(-1) for x in parts]), expected)
    torch.testing.assert_close(fs.curvature.vdot(drawn, drawn), expected.square().sum(), rtol=1e-13, atol=0)


def test_padding_of_random_trees_is_zero() -> None:
    tree = sharded(5)
    owned = fs.shard({name: torch.ones_like(x) for name, x in values().items()}, tree.layout)
    for key, x in fs.curvature.randn_like(tree, 1).items():
        assert torch.equal(x.sign().abs(), owned[key])


def test_seeds_names_and_elements_give_different_numbers() -> None:
    params = sharded(2)
    drawn = torch.cat([flat(fs.curvature.randn_like(params, seed)) for seed in (0, 1, 2, -1, 2**40)])
    assert drawn.unique().numel() == drawn.numel()


def test_a_vmap_over_seeds_draws_a_tree_for_each() -> None:
    params = sharded(1)
    batch = vmap(lambda seed: fs.curvature.randn_like(params, seed))(torch.arange(4))
    for seed in range(4):
        for key, x in fs.curvature.randn_like(params, seed).items():
            assert torch.equal(batch[key][seed], x)


def test_normal_numbers_are_rounded_equally_at_every_position_of_a_vector() -> None:
    bits = torch.randint(-(2**63), 2**63 - 1, (1000,))
    whole = normal(bits)
    assert all(torch.equal(normal(bits[i : i + n]), whole[i : i + n]) for i in range(0, 900, 7) for n in (1, 3, 17))


def test_moments_of_random_trees_are_those_of_the_standard_normal() -> None:
    whole = {"w": torch.zeros(300_000, dtype=torch.float64)}
    x = fs.gather(fs.curvature.randn_like(fs.shard(whole, fs.plan(whole, fs.simulated_mesh(3))), 5))["w"]
    n = x.numel() ** 0.5
    assert abs(x.mean()) * n < 5
    assert abs(x.square().mean() - 1) * n / 2**0.5 < 5
    assert abs(x.pow(4).mean() - 3) * n / 96**0.5 < 5
    assert abs((x[1:] * x[:-1]).mean()) * n < 5


def test_trees_of_different_layouts_are_refused() -> None:
    assert "different layouts" in refused(fs.curvature.vdot, sharded(2), sharded(3))
