"""shard and gather invert each other; what they send, what they never write to, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.sharding.test_resharding import bits, layouts, trees
from tests.support.models import awkward, loss_of, two_layers
from tests.support.refusals import refused


@settings(max_examples=80, deadline=None)
@given(data=st.data(), tree=trees())
def test_shard_and_gather_invert_each_other_bitwise(data: st.DataObject, tree: dict[str, Tensor]) -> None:
    layout = data.draw(layouts(tree))
    params = fs.shard(tree, layout)
    full = fs.gather(params)
    assert list(full) == [name for name in tree if name != "c.tied"]
    inside = layout.mesh.spmd(fs.gather)(params)
    for name, x in full.items():
        assert (x.dtype, x.shape) == (tree[name].dtype, tree[name].shape)
        for row in (x, *inside[name].flatten(0, len(layout.axes) - 1)):
            assert torch.equal(bits(row), bits(tree[name]))
    again = fs.shard(full, layout)
    assert all(torch.equal(bits(again[key]), bits(params[key])) for key in params)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_padding_filled_with_nan_changes_nothing_and_has_zero_gradient(num_ranks: int) -> None:
    mesh = fs.simulated_mesh(num_ranks)
    model = awkward()
    layout = fs.plan(model, mesh, align_bytes=64)
    params, frozen = fs.partition(fs.shard(model, layout))
    ones = fs.shard({name: torch.ones_like(p) for name, p in model.named_parameters()}, layout)
    poisoned = fs.Sharded({k: x.where(ones[k] == 1, torch.nan) for k, x in params.items()}, params.layout)
    x, y = mesh.split((torch.randn(16 * num_ranks, 5).double(), torch.randn(16 * num_ranks, 3).double()))
    step = mesh.spmd(lambda p, f, x, y: fs.grad_and_value(lambda p: loss_of(model, fs.gather(p, f), x, y))(p))
    (grads, loss), (clean_grads, clean_loss) = step(poisoned, frozen, x, y), step(params, frozen, x, y)
    assert torch.equal(loss, clean_loss)
    assert_trees_close(grads, clean_grads, rtol=0, atol=0)
    num_padding = 0
    for key, grad in grads.items():
        assert torch.equal(grad[ones[key] != 1], torch.zeros_like(grad[ones[key] != 1]))
        num_padding += int((ones[key] != 1).sum())
    assert num_padding > 0
    assert_trees_close(dict(fs.gather(poisoned)), dict(fs.gather(params)), rtol=0, atol=0)


def test_inputs_and_the_model_are_never_written_to() -> None:
    mesh, model = fs.simulated_mesh(3), awkward()
    params, frozen = fs.partition(fs.shard(model, fs.plan(model, mesh)))
    x, y = mesh.split((torch.randn(6, 5).double(), torch.randn(6, 3).double()))
    tensors = [*params.values(), *frozen.values(), *model.parameters(), x, y]
    versions = [tensor._version for tensor in tensors]
    full = fs.gather(params)
    fs.shard({**full, **fs.gather(frozen)}, fs.plan(model, mesh))
    mesh.spmd(lambda p, f, x, y: fs.grad(lambda p: loss_of(model, fs.gather(p, f), x, y))(p))(params, frozen, x, y)
    assert [tensor._version for tensor in tensors] == versions
    assert all(p.grad is None for p in model.parameters())


def test_partition_spends_nothing_on_the_frozen_half() -> None:
    mesh, model = fs.simulated_mesh(2), awkward()
    params = fs.shard(model, fs.plan(model, mesh))
    trainable, frozen = fs.partition(params)
    assert all(trainable[key] is params[key] for key in trainable)
    assert all(frozen[key] is params[key] for key in frozen)
    both = fs.gather(trainable, frozen)
    assert both.layout == params.layout
    assert list(both) == [name for name, _ in model.named_parameters()]
    assert both.layout == fs.gather(frozen, trainable).layout


def test_writing_to_gathered_tensors_does_not_reach_the_shards() -> None:
    for axes in ({"shard": 2}, {"replicate": 2, "shard": 2}, {"replicate": 2}):
        mesh = fs.simulated_mesh(axes)
        params = fs.shard(two_layers(), fs.plan(two_layers(), mesh))
        before = {key: x.clone() for key, x in params.items()}
        fs.gather(params)["0.weight"].zero_()
        if "shard" in axes:
            mesh.spmd(lambda p: fs.gather(p, lazy=False)["2.bias"].zero_())(params)
        assert_trees_close(dict(params), before, rtol=0, atol=0)


@pytest.mark.parametrize("axes", [{"shard": 3}, {"replicate": 2, "shard": 2}, {"replicate": 2}], ids=str)
def test_shard_inside_spmd_keeps_each_rank_its_own_part(axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh(axes)
    params = fs.shard(awkward(), fs.plan(awkward(), mesh, align_bytes=64))
    again = mesh.spmd(lambda p: fs.shard(fs.gather(p), p.layout))(params)
    assert_trees_close(again, params, rtol=0, atol=0)
    by_data = mesh.spmd(lambda p, x: fs.shard(fs.gather(p) | {"scale": x.sum()}, p.layout))
    x = torch.ones(*axes.values(), 2).double()
    assert fs.gather(by_data(params, x))["scale"] == 2


def test_parts_of_different_plans_do_not_go_together() -> None:
    mesh, model = fs.simulated_mesh(2), awkward()
    trainable, _ = fs.partition(fs.shard(model, fs.plan(model, mesh)))
    _, frozen = fs.partition(fs.shard(model, fs.plan(model, mesh, reduction="sum", align_bytes=0)))
    text = refused(fs.gather, trainable, frozen)
    assert "gather: the trees were planned for other ranks or with other options" in text


def test_a_mesh_axis_that_nothing_reduces_over_is_refused() -> None:
    mesh = fs.simulated_mesh({"dp": 2, "shard": 2})
    text = refused(fs.plan, two_layers(), mesh)
    assert "axis 'dp' of 2 ranks is neither shard_axis nor replicate_axis" in text
    assert fs.plan(two_layers(), mesh, replicate_axis="dp").num_ranks == 4


def test_trees_that_do_not_fit_are_refused_with_all_their_problems() -> None:
    layout = fs.plan(two_layers(), fs.simulated_mesh(2), align_bytes=0)
    values: dict[str, Any] = {"0.weight": torch.zeros(5, 7), "0.bias": torch.zeros(7).long(), "0.wieght": None}
    text = refused(fs.shard, values, layout)
    assert "shard: 5 problems" in text
    for line in (
        "'2.bias': missing",
        "'0.wieght': not in the layout (did you mean '0.weight'?)",
        "'0.weight': got shape (5, 7), torch.float32, expected (7, 5), torch.float32",
        "'0.bias': got shape (7,), torch.int64, expected (7,), torch.float32",
    ):
        assert line in text
    params = fs.shard(two_layers(), layout)
    text = refused(fs.gather, fs.Sharded({"0": params["0"].double(), "2": None}, layout))
    assert "'0': got shape (2, 21), torch.float64, expected (2, 21), torch.float32" in text
    assert "'2': got NoneType" in text
    grads: Any = {"0.weight": torch.zeros(2, 5, 7), "0.bias": torch.zeros(2, 7).long()}
    text = refused(layout.mesh.spmd(lambda g: fs.scatter_grads(g, layout)), grads)
    assert "scatter_grads: 4 problems" in text
    assert "'0.weight': got shape (5, 7)" in text
    whole = {name: torch.zeros_like(p) for name, p in two_layers().named_parameters()}
    assert "expected (2, 7, 5), torch.float32" in refused(fs.scatter_grads, whole, layout)
