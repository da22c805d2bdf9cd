"""Offloaded trees have the same values; tests/device computes with them on the device of the mesh."""

from __future__ import annotations

import torch

import functorch_shard as fs
from tests.support.refusals import refused


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
