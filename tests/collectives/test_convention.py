"""fs.grad is the gradient of the mean over ranks at every order, whatever is differentiated inside."""

from __future__ import annotations

import optree
import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.convention import (
    INNER,
    LR,
    TASKS,
    Samples,
    Side,
    dot_over_ranks,
    expected,
    on_mesh,
    plain_loss,
    sharded_loss,
    sharded_side,
    whole_parameters,
)

MESHES = [{"shard": 1}, {"shard": 2}, {"shard": 3}, {"replicate": 3}, {"replicate": 2, "shard": 3}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("inner", INNER)
def test_the_gradient_is_exact_through_gradients_steps_and_penalties(inner: str, axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh({"shard": 1, **axes})
    result = on_mesh(mesh, sharded_side(inner, None), list(TASKS))
    assert_trees_close(result, expected(mesh.size, list(TASKS)), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("axes", MESHES[1:], ids=str)
def test_a_hessian_product_by_psum_is_right_whoever_differentiates(axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh({"shard": 1, **axes})
    task = ["reverse over reverse"]
    for outer in (fs.grad, torch.func.grad):
        for inner in ("fs.grad", "torch.func.grad"):
            result = on_mesh(mesh, sharded_side(inner, None, outer), task)
            assert_trees_close(result, expected(mesh.size, task), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("axes", MESHES[1:], ids=str)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("task", ["through one step", "through three steps"])
def test_a_gradient_through_a_step_by_another_than_fs_grad_is_refused(
    task: str, inner: str, axes: dict[str, int]
) -> None:
    mesh = fs.simulated_mesh({"shard": 1, **axes})
    with pytest.raises(RuntimeError, match=r"outermost reverse-mode derivative be fs\.grad"):
        on_mesh(mesh, sharded_side(inner, None, torch.func.grad), [task])


def test_one_rank_alone_may_be_differentiated_by_anybody() -> None:
    mesh = fs.simulated_mesh(1)
    for inner in INNER:
        result = on_mesh(mesh, sharded_side(inner, None, torch.func.grad), list(TASKS))
        assert_trees_close(result, expected(1, list(TASKS)), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("axes", MESHES[1:], ids=str)
def test_a_step_that_stops_the_gradient_may_be_differentiated_by_anybody(axes: dict[str, int]) -> None:
    """First-order MAML: the gradient at the parameters after the step."""
    mesh = fs.simulated_mesh({"shard": 1, **axes})

    def stopped(p: fs.Sharded, x: torch.Tensor, y: torch.Tensor) -> fs.Sharded:
        grads = fs.grad(loss)(p, x, y)
        return fs.Sharded({key: g.detach() for key, g in grads.items()}, grads.layout)

    loss = lambda p, x, y: sharded_loss(p, x, y, None)  # noqa: E731
    sides = [Side(loss, stopped, outer, dot_over_ranks, fs.global_norm) for outer in (fs.grad, torch.func.grad)]
    by_fs, by_torch = (on_mesh(mesh, side, ["through one step"]) for side in sides)
    assert_trees_close(by_torch, by_fs, rtol=1e-12, atol=1e-14)


def stacked_tree(axes: dict[str, int]) -> tuple[fs.Mesh, fs.Sharded, Samples]:
    mesh = fs.simulated_mesh({"shard": 1, **axes})
    params = fs.shard(whole_parameters(), fs.plan(whole_parameters(), mesh))
    return mesh, params, Samples(*mesh.split(tuple(x.flatten(0, 1) for x in Samples.of(mesh.size).tensors())))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_around_spmd_it_is_the_derivative_of_what_is_returned(axes: dict[str, int]) -> None:
    mesh, params, rows = stacked_tree(axes)
    losses = mesh.spmd(lambda p, x, y: sharded_loss(p, x, y, None))
    inside = mesh.spmd(fs.grad(lambda p, x, y: sharded_loss(p, x, y, None)))(params, rows.x, rows.y)
    mean = fs.grad(lambda p: losses(p, rows.x, rows.y).mean())(params)
    total = fs.grad(lambda p: losses(p, rows.x, rows.y).sum())(params)
    by_torch = torch.func.grad(lambda p: losses(p, rows.x, rows.y).sum())(params)
    assert_trees_close(dict(mean), dict(inside), rtol=1e-12, atol=1e-14)
    assert_trees_close({key: x / mesh.size for key, x in total.items()}, dict(inside), rtol=1e-12, atol=1e-14)
    assert_trees_close(dict(by_torch), dict(inside), rtol=1e-12, atol=1e-14)  # there gather's backward takes the mean


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_outside_spmd_a_gradient_through_a_step_is_that_of_the_unsharded_model(axes: dict[str, int]) -> None:
    _, params, rows = stacked_tree(axes)
    x, y = (t.flatten(0, -3)[0] for t in (rows.x, rows.y))
    loss = lambda p: plain_loss(fs.gather(p), x, y)  # noqa: E731
    step = lambda gradient, p: optree.tree_map(lambda w, g: w - LR * g, p, gradient(p))  # noqa: E731
    whole = lambda p: plain_loss(p, x, y)  # noqa: E731
    want = torch.func.grad(lambda p: whole(step(torch.func.grad(whole), p)))(whole_parameters())
    got = fs.grad(lambda p: loss(step(fs.grad(loss), p)))(params)
    for key, shard in got.items():  # copies are equal
        dims = [i for i, name in enumerate(params.layout.mesh.axes) if name == "replicate"]
        assert all(torch.equal(shard, shard.select(dim, 0).unsqueeze(dim).expand_as(shard)) for dim in dims), key
    assert_trees_close(dict(fs.gather(got)), want, rtol=1e-10, atol=1e-13)
