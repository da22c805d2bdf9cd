"""An optimizer's step under torch.func: batched by vmap, and never differentiated in silence."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.steps import optimizer, planned, sharded_grads, stepping, values, whole


def test_the_derivative_of_a_step_is_refused_and_never_zero() -> None:
    layout, opt = planned(fs.simulated_mesh(2)), optimizer("adamw")
    params, grads = fs.shard(whole(), layout), sharded_grads(layout, 1)

    def after(x: Tensor) -> Tensor:
        new, _ = opt.step(fs.Sharded({**params, "a": x}, layout), grads=grads, state=opt.init(params))
        return new["a"].sum()

    tracked = params["a"].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"updates have no derivative.*torchopt"):
        torch.func.grad(after)(params["a"])
    with pytest.raises(NotImplementedError, match="updates have no derivative"):
        after(tracked).backward()
    with pytest.raises(NotImplementedError, match="updates have no derivative"):
        torch.func.jvp(after, (params["a"],), (params["a"],))
    assert not after(tracked.detach()).requires_grad


def test_a_step_inside_another_gradient_is_fine_if_it_is_not_differentiated() -> None:
    layout, opt = planned(fs.simulated_mesh(2)), optimizer("adamw")
    params, grads = fs.shard(whole(), layout), sharded_grads(layout, 1)

    def loss(x: Tensor) -> Tensor:
        opt.step(params, grads=grads, state=opt.init(params))
        return (x * x).sum()

    x = torch.tensor([1.0, 3.0])
    assert torch.equal(torch.func.grad(loss)(x), 2 * x)


def stacked(*trees: Any) -> Any:
    return optree.tree_map(lambda *xs: torch.stack(xs), *trees)


def member(opt: fs.Optimizer, layout: fs.Layout, seed: int, num_steps: int) -> tuple[fs.Sharded, fs.Sharded, Any]:
    """One of an ensemble, after some steps: parameters, the next gradients, state."""
    params = fs.shard(values(seed), layout)
    state = opt.init(params)
    for i in range(num_steps):
        params, state = opt.step(params, grads=fs.shard(values(10 * seed + i), layout), state=state)
    return params, fs.shard(values(10 * seed + 9), layout), state


@pytest.mark.parametrize("num_steps", [(2, 2, 2), (1, 4, 2)], ids=["in_step", "out_of_step"])
@pytest.mark.parametrize("where", ["stacked", "outside_spmd", "inside_spmd", "one_rank"])
@pytest.mark.parametrize("case", ["sgd_momentum", "adamw", "nadam", "asgd", "rprop"])
def test_vmap_over_an_ensemble_equals_a_loop(case: str, where: str, num_steps: tuple[int, ...]) -> None:
    mesh = fs.init_mesh() if where == "one_rank" else fs.simulated_mesh(2)
    layout, opt = fs.plan(values(), mesh), optimizer(case)
    members = [member(opt, layout, seed + 1, n) for seed, n in enumerate(num_steps)]
    step: Any = torch.func.vmap(stepping(opt))
    if where == "outside_spmd":
        step = torch.func.vmap(mesh.spmd(stepping(opt)))
    if where == "inside_spmd":
        step = mesh.spmd(torch.func.vmap(stepping(opt)), in_dims=1, out_dims=1)
    expected = stacked(*(stepping(opt)(*one) for one in members))
    assert_trees_close(step(*stacked(*members)), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("donate", [False, True])
def test_what_has_no_batch_dim_is_not_shared_by_the_rows(donate: bool) -> None:
    layout, opt = fs.plan(values(), fs.simulated_mesh(2)), optimizer("adamw")
    params, grads = fs.shard(values(), layout), [fs.shard(values(i), layout) for i in (1, 2)]
    state = opt.init(params)
    expected = stacked(*(opt.step(params, grads=one, state=state) for one in grads))
    both = torch.func.vmap(lambda grads: opt.step(params, grads=grads, state=state, donate=donate))(stacked(*grads))
    assert_trees_close(both, expected, rtol=1e-12, atol=1e-13)
