"""Real gloo ranks: fs.grad is the gradient of the mean over ranks at every order, lazily and at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import functional

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.convention import (
    INNER,
    TASKS,
    Samples,
    Side,
    autograd_grad,
    direction,
    dot_over_ranks,
    expected,
    on_mesh,
    plain_loss,
    sharded_loss,
    sharded_side,
    whole_parameters,
)
from tests.support.pool import run_ranks
from tests.support.refusals import text_of

LAZY = {"lazy": None, "at once": False}
MESHES = [{"shard": 2}, {"replicate": 2, "shard": 1}, {"shard": 4}, {"replicate": 2, "shard": 2}]
every_mesh = pytest.mark.parametrize("axes", MESHES, ids=str)


def size(axes: dict[str, int]) -> int:
    return fs.simulated_mesh(axes).size


def results_on_this_rank(axes: dict[str, int]) -> dict[str, Any]:
    mesh = fs.init_mesh(axes)
    sides = {f"{inner}, {name}": sharded_side(inner, lazy) for inner in INNER for name, lazy in LAZY.items()}
    return {name: on_mesh(mesh, side, list(TASKS)) for name, side in sides.items()}


@every_mesh
def test_the_gradient_is_exact_through_gradients_steps_and_penalties(axes: dict[str, int]) -> None:
    want = expected(size(axes), list(TASKS))
    for result in run_ranks(results_on_this_rank, size(axes), axes):
        for side in result:
            assert_trees_close({side: result[side]}, {side: want}, rtol=1e-10, atol=1e-13)


def refusals_on_this_rank(axes: dict[str, int]) -> list[str]:
    """Through one step: by torch.func.grad, lazily and at once, and by backward()."""
    mesh = fs.init_mesh(axes)
    task = ["through one step"]
    told = [text_of(on_mesh, mesh, sharded_side(i, z, torch.func.grad), task) for i in INNER for z in LAZY.values()]
    for lazy in LAZY.values():
        layout = fs.plan(whole_parameters(), mesh)
        params = fs.shard(whole_parameters(), layout)
        params = fs.Sharded({key: x.requires_grad_() for key, x in params.items()}, layout)
        rows = Samples(*mesh.split(tuple(x.flatten(0, 1) for x in Samples.of(mesh.size).tensors())))
        side = sharded_side("fs.grad", lazy)
        loss = side.loss(side.step(params, rows), rows.next_x, rows.next_y)
        told.append(text_of(loss.backward))
    return told


@every_mesh
def test_a_gradient_through_a_step_by_another_than_fs_grad_is_refused_on_every_rank(axes: dict[str, int]) -> None:
    for told in run_ranks(refusals_on_this_rank, size(axes), axes):
        assert [("outermost reverse-mode derivative be fs.grad" in text) for text in told] == [True] * 8


def products_on_this_rank(axes: dict[str, int]) -> list[Any]:
    """Hessian products by psum, differentiated by anybody; and a step by torch.autograd.grad inside of fs.grad."""
    mesh = fs.init_mesh(axes)
    product, step = ["reverse over reverse"], ["through one step"]
    results = []
    for lazy in LAZY.values():
        for outer in (fs.grad, torch.func.grad, autograd_outer):
            results += [
                on_mesh(mesh, sharded_side(inner, lazy, outer), product) for inner in ("fs.grad", "torch.func.grad")
            ]
        loss = lambda p, x, y, lazy=lazy: sharded_loss(p, x, y, lazy)  # noqa: E731
        inner = Side(loss, autograd_grad(loss), fs.grad, dot_over_ranks, fs.global_norm)
        results.append(on_mesh(mesh, inner, product) | on_mesh(mesh, inner, step))
    return results


def autograd_outer(fn: Any) -> Any:
    """``backward()`` as a function of parameters."""

    def gradient(p: fs.Sharded) -> fs.Sharded:
        leaves = fs.Sharded({key: x.detach().requires_grad_() for key, x in p.items()}, p.layout)
        fn(leaves).backward()
        return fs.Sharded({key: x.grad for key, x in leaves.items()}, p.layout)

    return gradient


@every_mesh
def test_torch_autograd_inside_of_fs_grad_and_products_by_anybody_are_exact(axes: dict[str, int]) -> None:
    want = expected(size(axes), ["reverse over reverse", "through one step"])
    for results in run_ranks(products_on_this_rank, size(axes), axes):
        for result in results:
            assert_trees_close(result, {task: want[task] for task in result}, rtol=1e-10, atol=1e-13)


def twice_on_this_rank(axes: dict[str, int], reduction: Any) -> list[Any]:
    """What torch.autograd.functional makes of the loss: itself or an error, beside forward mode; and by the input."""
    mesh = fs.init_mesh(axes)
    layout = fs.plan(whole_parameters(), mesh, reduction=reduction)
    params, v = fs.shard(whole_parameters(), layout), fs.shard(direction(), layout)
    rows = Samples(*mesh.split(tuple(x.flatten(0, 1) for x in Samples.of(mesh.size).tensors())))
    results = []
    for lazy in LAZY.values():
        loss = lambda p, x=rows.x, lazy=lazy: sharded_loss(p, x, rows.y, lazy)  # noqa: E731
        of_shards = lambda *xs, loss=loss: loss(fs.Sharded(zip(params, xs, strict=True), layout))  # noqa: E731
        product = torch.func.jvp(torch.func.grad(loss), (params,), (v,))[1]
        want = torch.func.jvp(loss, (params,), (v,))[1], *[tuple(product.values())] * 2
        given = tuple(params.values()), tuple(v.values())
        for function, value in zip((functional.jvp, functional.hvp, functional.vhp), want, strict=True):
            told = text_of(function, of_shards, *given)
            results.append(told or all_close(function(of_shards, *given)[1], value))
        leaves = fs.Sharded({key: x.clone().requires_grad_() for key, x in params.items()}, layout)
        by_input = functional.hvp(lambda x, loss=loss, leaves=leaves: loss(leaves, x), rows.x, rows.next_x)[1]
        alone = functional.hvp(lambda x: plain_loss(whole_parameters(), x, rows.y), rows.x, rows.next_x)[1]
        results.append(all_close(by_input, alone))
    return results


def all_close(a: Any, b: Any) -> bool:
    assert_trees_close(a, b, rtol=1e-10, atol=1e-13)
    return True


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@every_mesh
def test_torch_autograd_functional_is_right_or_refused_on_every_rank(axes: dict[str, int], reduction: str) -> None:
    copies, shards = axes.get("replicate", 1), axes["shard"]
    right = (copies if reduction == "sum" else shards) == 1
    for results in run_ranks(twice_on_this_rank, size(axes), axes, reduction):
        for *twice, by_input in (results[:4], results[4:]):
            assert by_input is True
            for name, result in zip(("jvp", "hvp", "vhp"), twice, strict=True):
                assert result is True if right else f"torch.autograd.functional.{name} takes the backward" in result


def by_hand_on_this_rank(axes: dict[str, int]) -> list[Any]:
    """Second derivatives of what ranks return and nobody sums: by fs.grad, and by backward()."""
    mesh, tasks = fs.init_mesh(axes), ["reverse over reverse", "penalty on the norm of the gradient"]
    mine = lambda a, b: torch.stack([(a[key] * b[key]).sum() for key in a]).sum()  # noqa: E731
    norm = lambda a: mine(a, a).sqrt()  # noqa: E731
    results = []
    for lazy in LAZY.values():
        loss = lambda p, x, y, lazy=lazy: sharded_loss(p, x, y, lazy)  # noqa: E731
        results.append([on_mesh(mesh, Side(loss, autograd_grad(loss), o, mine, norm), tasks) for o in OUTER])
    return results


OUTER = fs.grad, autograd_outer


@every_mesh
def test_a_second_derivative_by_backward_is_of_the_mean_of_what_ranks_return_as_by_fs_grad(
    axes: dict[str, int],
) -> None:
    for results in run_ranks(by_hand_on_this_rank, size(axes), axes):
        for by_fs, by_backward in results:
            assert_trees_close(by_backward, by_fs, rtol=1e-10, atol=1e-13)


def penalty_by_closure(params: fs.Sharded, x: Tensor) -> Tensor:
    """The inner fs.grad is by the input alone; parameters reach it by a closure."""
    full = fs.gather(params)
    return fs.grad(lambda x: torch.tanh(full["0.weight"] @ x).sum())(x).square().sum()


def closure_on_this_rank(axes: dict[str, int]) -> Any:
    mesh = fs.init_mesh(axes)
    params = fs.shard(whole_parameters(), fs.plan(whole_parameters(), mesh))
    x = Samples.of(mesh.size).x.flatten(0, 1)[mesh.rank]
    return dict(fs.gather(fs.grad(penalty_by_closure)(params, x), lazy=False))


@every_mesh
def test_what_an_inner_fs_grad_closes_over_has_a_gradient(axes: dict[str, int]) -> None:
    def penalty(weight: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: torch.tanh(weight @ x).sum())(x).square().sum()

    rows = Samples.of(size(axes)).x.flatten(0, 1)[: size(axes)]
    want = torch.func.grad(lambda w: torch.stack([penalty(w, x) for x in rows]).mean())(whole_parameters()["0.weight"])
    for result in run_ranks(closure_on_this_rank, size(axes), axes):
        assert result.keys() == whole_parameters().keys()
        assert_trees_close(result["0.weight"], want, rtol=1e-10, atol=1e-13)
