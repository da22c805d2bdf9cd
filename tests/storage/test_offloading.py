"""Offloaded trees have the same values, and are computed with on the device of the mesh."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

import functorch_shard as fs
from tests.support.refusals import refused

SAMPLES = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_what_is_on_the_cpu_is_passed_through_and_no_other_place_is_known() -> None:
    tree = {"a": torch.ones(7, 3), "b": [torch.tensor(1), torch.ones(3, requires_grad=True) * 2], "c": 2.5, "d": None}
    moved = fs.offload(tree, "cpu")
    assert moved["a"].data_ptr() == tree["a"].data_ptr()
    assert torch.equal(moved["b"][1], tree["b"][1])
    assert not moved["b"][1].requires_grad
    assert (moved["c"], moved["d"]) == (2.5, None)
    assert "got 'cuda:0', expected 'cpu'" in refused(fs.offload, tree, "cuda:0")


def test_inside_a_transform_it_is_refused() -> None:
    mesh = fs.simulated_mesh(2)
    assert "inside mesh.spmd" in refused(mesh.spmd(lambda x: fs.offload(x, "cpu")), torch.zeros(2, 3))


def mesh_on(device: str) -> fs.Mesh:
    one_rank = fs.init_mesh(device="cpu")
    return fs.Mesh(tuple(one_rank), torch.device(device))


def test_shards_on_the_cpu_are_gathered_on_the_device_of_the_mesh() -> None:
    """The meta device stands for a GPU: what is computed there shows where, if not what."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()
    on_cpu = fs.shard(model, fs.plan(model, mesh_on("cpu")))
    params = on_cpu.on(mesh_on("meta"))
    for lazy in (None, True, False):
        full = fs.gather(params, lazy=lazy)
        assert {x.device.type for x in full.values()} == {"meta"}
        assert functional_call(model, full, (SAMPLES.to("meta"),)).device.type == "meta"
    assert {x.device.type for x in params.values()} == {"cpu"}
