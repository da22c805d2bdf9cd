"""fs.grad is the gradient of the mean over ranks at every order, whatever is differentiated inside."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import functional

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.laws.convention import (
    INNER,
    LR,
    TASKS,
    Samples,
    Side,
    autograd_grad,
    expected,
    of_shards,
    on,
    on_mesh,
    plain_loss,
    sharded_loss,
    sharded_side,
    tree_map,
    whole_parameters,
)
from tests.support.differentiated import by_backward
from tests.support.ranks import HYBRID, Ranks, gloo, on_each, sequential, simulated, slow
from tests.support.refusals import text_of

MESHES = [{"shard": 1}, {"shard": 2}, {"shard": 3}, {"replicate": 3}, {"replicate": 2, "shard": 3}]
SIMULATED = simulated(*({"shard": 1, **axes} for axes in MESHES))
REAL = gloo(2, HYBRID, {"replicate": 2, "shard": 1}, 4)
REAL_KINDS = [*REAL[:2], *slow(REAL[2:])]
LAZY = None, False


def lazy_and_at_once(mesh: fs.Mesh) -> tuple[bool | None, ...]:
    """Simulated ranks have no lazy tensors."""
    return LAZY[:1] if mesh.is_simulated else LAZY


def tasks(ranks: Ranks) -> list[str]:
    """Three steps, a third of the time of all, where they are one batch, and on real ranks with one axis."""
    return [task for task in TASKS if task != "through three steps" or ranks.kind == "batched" or ranks == REAL[0]]


def gathered(inner: str, ranks: Ranks) -> tuple[bool | None, ...]:
    """Both on real ranks with one axis, on others one in turn, so that each inner gradient and each kind has both."""
    if not ranks.real:
        return LAZY[:1]
    return LAZY if ranks == REAL[0] else (LAZY[(list(INNER).index(inner) + REAL.index(ranks)) % 2],)


def derived(mesh: fs.Mesh, inner: str, tasks: list[str], lazy: tuple[bool | None, ...]) -> list[dict[str, fs.Full]]:
    return [on_mesh(mesh, sharded_side(inner, each), tasks) for each in lazy]


@pytest.mark.parametrize("ranks", [*SIMULATED, *REAL_KINDS], ids=str)
@pytest.mark.parametrize("inner", INNER)
def test_the_gradient_is_exact_through_gradients_steps_and_penalties(inner: str, ranks: Ranks) -> None:
    want = expected(ranks.size, tasks(ranks))
    for results in ranks.run(derived, inner, tasks(ranks), gathered(inner, ranks)):
        assert_trees_close(results, [want] * len(results), rtol=1e-10, atol=1e-13)


def refusals(mesh: fs.Mesh, task: str, inner: str) -> list[str]:
    """By torch.func.grad, and on real ranks by backward()."""
    told = [text_of(on_mesh, mesh, sharded_side(inner, z, torch.func.grad), [task]) for z in lazy_and_at_once(mesh)]
    if not mesh.is_simulated:
        told += [text_of(on_mesh, mesh, sharded_side(inner, lazy, by_backward), [task]) for lazy in LAZY]
    return told


@pytest.mark.parametrize("task", ["through one step", "through three steps"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("ranks", [*SIMULATED[1:], *REAL_KINDS, *sequential({"replicate": 2, "shard": 3})], ids=str)
def test_a_gradient_through_a_step_by_another_than_fs_grad_is_refused(task: str, inner: str, ranks: Ranks) -> None:
    for told in ranks.run(refusals, task, inner):
        assert all("RuntimeError" in text and "outermost reverse-mode derivative be fs.grad" in text for text in told)


@on_each(REAL_KINDS)
def test_torch_autograd_inside_of_fs_grad_is_exact(mesh: fs.Mesh) -> None:
    tasks = ["reverse over reverse", "through one step"]
    for lazy in LAZY:
        loss = partial(sharded_loss, lazy=lazy)
        side = of_shards(loss, autograd_grad(loss))
        assert_trees_close(on_mesh(mesh, side, tasks), expected(mesh.size, tasks), rtol=1e-10, atol=1e-13)


def test_one_rank_alone_may_be_differentiated_by_anybody() -> None:
    mesh = fs.simulated_mesh(1)
    for inner in INNER:
        result = on_mesh(mesh, sharded_side(inner, None, torch.func.grad), list(TASKS))
        assert_trees_close(result, expected(1, list(TASKS)), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("axes", MESHES[1:], ids=str)
def test_a_step_that_stops_the_gradient_may_be_differentiated_by_anybody(axes: dict[str, int]) -> None:
    """First-order MAML: the gradient at the parameters after the step."""
    mesh, loss = fs.simulated_mesh({"shard": 1, **axes}), partial(sharded_loss, lazy=None)
    stopped = lambda p, x, y: tree_map(Tensor.detach, fs.grad(loss)(p, x, y))  # noqa: E731
    sides = [of_shards(loss, stopped, outer) for outer in (fs.grad, torch.func.grad)]
    by_fs, by_torch = (on_mesh(mesh, side, ["through one step"]) for side in sides)
    assert_trees_close(by_torch, by_fs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_around_spmd_it_is_the_derivative_of_what_is_returned(axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh({"shard": 1, **axes})
    params, _, rows = on(mesh)
    of_rank = partial(sharded_loss, lazy=None)
    losses, inside = mesh.spmd(of_rank), mesh.spmd(fs.grad(of_rank))(params, rows.x, rows.y)
    mean = fs.grad(lambda p: losses(p, rows.x, rows.y).mean())(params)
    total = fs.grad(lambda p: losses(p, rows.x, rows.y).sum())(params)
    by_torch = torch.func.grad(lambda p: losses(p, rows.x, rows.y).sum())(params)
    assert_trees_close(dict(mean), dict(inside), rtol=1e-12, atol=1e-14)
    assert_trees_close({key: x / mesh.size for key, x in total.items()}, dict(inside), rtol=1e-12, atol=1e-14)
    assert_trees_close(dict(by_torch), dict(inside), rtol=1e-12, atol=1e-14)  # there gather's backward takes the mean


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_outside_spmd_a_gradient_through_a_step_is_that_of_the_unsharded_model(axes: dict[str, int]) -> None:
    params, _, rows = on(fs.simulated_mesh({"shard": 1, **axes}))
    x, y = (t.flatten(0, -3)[0] for t in (rows.x, rows.y))

    def loss(p: fs.Sharded) -> Tensor:
        return plain_loss(fs.gather(p), x, y)

    def step(gradient: Any, p: Any) -> Any:
        return tree_map(lambda w, g: w - LR * g, p, gradient(p))

    def whole(p: Any) -> Any:
        return plain_loss(p, x, y)

    want = torch.func.grad(lambda p: whole(step(torch.func.grad(whole), p)))(whole_parameters())
    got = fs.grad(lambda p: loss(step(fs.grad(loss), p)))(params)
    for key, shard in got.items():  # copies are equal
        dims = [i for i, name in enumerate(params.layout.mesh.axes) if name == "replicate"]
        assert all(torch.equal(shard, shard.select(dim, 0).unsqueeze(dim).expand_as(shard)) for dim in dims), key
    assert_trees_close(dict(fs.gather(got)), want, rtol=1e-10, atol=1e-13)


@on_each(REAL_KINDS)
def test_torch_autograd_functional_is_right_or_refused_on_every_rank(mesh: fs.Mesh) -> None:
    """Beside forward mode; and by the input it is right."""
    close = partial(assert_trees_close, rtol=1e-10, atol=1e-13)
    for reduction, lazy in product(("mean", "sum"), LAZY):
        params, v, rows = on(mesh, reduction=reduction)
        right = mesh.axes.get("replicate" if reduction == "sum" else "shard", 1) == 1

        def loss(p: Any, x: Tensor = rows.x, rows: Samples = rows, lazy: bool | None = lazy) -> Tensor:
            return sharded_loss(p, x, rows.y, lazy)

        def of_shards(*xs: Any, loss: Any = loss, params: fs.Sharded = params) -> Any:
            return loss(fs.Sharded(zip(params, xs, strict=True), params.layout))

        hessian_product = torch.func.jvp(torch.func.grad(loss), (params,), (v,))[1]
        want = torch.func.jvp(loss, (params,), (v,))[1], tuple(hessian_product.values())
        given = tuple(params.values()), tuple(v.values())
        for function, value in zip((functional.jvp, functional.hvp), want, strict=True):
            if right:
                close(function(of_shards, *given)[1], value)
            else:
                assert "jvp and hvp, which take" in text_of(function, of_shards, *given)
        leaves = tree_map(lambda x: x.clone().requires_grad_(), params)
        by_input = functional.hvp(lambda x, loss=loss, leaves=leaves: loss(leaves, x), rows.x, rows.next_x)[1]
        alone = functional.hvp(lambda x, rows=rows: plain_loss(whole_parameters(), x, rows.y), rows.x, rows.next_x)[1]
        close(by_input, alone)


@on_each(REAL_KINDS)
def test_a_second_derivative_by_backward_is_of_the_mean_of_what_ranks_return_as_by_fs_grad(mesh: fs.Mesh) -> None:
    """Of what nobody sums."""
    tasks = ["reverse over reverse", "penalty on the norm of the gradient"]
    for lazy in LAZY:
        loss = partial(sharded_loss, lazy=lazy)
        sides = (Side(loss, autograd_grad(loss), outer) for outer in (fs.grad, by_backward))
        by_fs, by_autograd = (on_mesh(mesh, side, tasks) for side in sides)
        assert_trees_close(by_autograd, by_fs, rtol=1e-10, atol=1e-13)


@on_each(REAL_KINDS)
def test_what_an_inner_fs_grad_closes_over_has_a_gradient(mesh: fs.Mesh) -> None:
    """The inner fs.grad is by the input alone; parameters reach it by a closure."""

    def penalty(grad: Any, weight: Tensor, x: Tensor) -> Tensor:
        return grad(lambda x: torch.tanh(weight @ x).sum())(x).square().sum()

    rows = Samples.of(mesh.size).x.flatten(0, 1)[: mesh.size]
    by_closure = fs.grad(lambda p: penalty(fs.grad, fs.gather(p)["0.weight"], rows[mesh.rank]))(on(mesh)[0])
    mean = lambda w: torch.stack([penalty(torch.func.grad, w, x) for x in rows]).mean()  # noqa: E731
    result, whole = fs.gather(by_closure, lazy=False), whole_parameters()
    assert result.keys() == whole.keys()
    assert_trees_close(result["0.weight"], torch.func.grad(mean)(whole["0.weight"]), rtol=1e-10, atol=1e-13)
