"""Derivatives through gather and scatter_grads are those of the unsharded model, on simulated and on gloo ranks."""

from __future__ import annotations

import copy
import io
import pickle
from functools import cache
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.gradients import LOCAL, ON_RANK, Data, expected, on_mesh, whole
from tests.support.looped import looped
from tests.support.models import awkward, loss_of, two_layers
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, simulated, slow
from tests.support.refusals import text_of

REPLICAS = [{"replicate": 2, "shard": 3}, {"shard": 3, "replicate": 2}, {"replicate": 3}]
every_task = looped("task", ON_RANK)


def derivatives(mesh: fs.Mesh, tasks: list[str], options: dict[str, Any]) -> dict[str, Any]:
    results = on_mesh(mesh, Data(mesh.size), tasks, **options)
    return {task: dict(rows) if isinstance(rows, fs.Full) else rows for task, rows in results.items()}


@cache
def every_derivative(ranks: Ranks, reduction: str) -> list[dict[str, Any]]:
    return ranks.run(derivatives, list(ON_RANK), {"reduction": reduction})


def assert_unsharded(results: list[dict[str, Any]], task: str, reduction: str) -> None:
    rows: Any = optree.tree_map(lambda *leaves: torch.stack(leaves), *(result[task] for result in results))
    actual = rows if task in LOCAL else whole_of(rows)
    assert_trees_close({task: actual}, {task: expected(task, Data(len(results)), reduction)}, rtol=1e-10, atol=1e-10)


def whole_of(rows: Any) -> dict[str, Tensor]:
    """Whole values from the shards of all ranks, in rank order."""
    axes = dict(rows.layout.axes)
    stacked = {key: x.unflatten(0, tuple(axes.values())) for key, x in rows.items()}
    if list(axes) == ["shard", "replicate"]:  # replicas first
        stacked = {key: x.transpose(0, 1) for key, x in stacked.items()}
    return whole(fs.Sharded(stacked, rows.layout), axes.get("replicate", 1))


@pytest.mark.parametrize(
    "ranks", [*simulated(1, 3, 8), *sequential(3), *gloo(2), *slow([*simulated(2, 5), *gloo(3)])], ids=str
)
@every_task
def test_every_derivative_is_that_of_the_unsharded_model(task: str, ranks: Ranks) -> None:
    assert_unsharded(every_derivative(ranks, "mean"), task, "mean")


@pytest.mark.parametrize("ranks", [*simulated(*REPLICAS), *gloo(HYBRID)], ids=str)
@every_task
def test_replicas_and_shards_average_over_all_ranks(task: str, ranks: Ranks) -> None:
    assert_unsharded(every_derivative(ranks, "mean"), task, "mean")


@pytest.mark.parametrize("ranks", [*simulated(3, HYBRID), *gloo(2)], ids=str)
@every_task
def test_the_sum_reduction_is_the_gradient_of_the_sum(task: str, ranks: Ranks) -> None:
    assert_unsharded(every_derivative(ranks, "sum"), task, "sum")


@pytest.mark.parametrize(
    "options",
    [
        {"units": [["inp", "out"], ["blocks"]]},
        {"units": 1},
        {"units": 10**9, "align_bytes": 0},
        {"ignored": ["blocks.0", "scale"]},
        {"labels": lambda name, p: "no_decay" if p.ndim < 2 else None, "align_bytes": 64},
    ],
    ids=["lists", "one parameter each", "one unit, packed", "whole", "labels"],
)
def test_layouts_do_not_change_derivatives(options: dict[str, Any]) -> None:
    tasks = ["grad through gather", "fs.grad", "reverse over reverse", "forward over scatter_grads"]
    results = simulated(HYBRID)[0].run(derivatives, tasks, options)
    for task in tasks:
        assert_unsharded(results, task, "mean")


def train(mesh: fs.Mesh) -> tuple[list[float], fs.Full]:
    """SGD with momentum on a model of awkward parameters: losses, and the final parameters."""
    model = awkward()
    params = fs.shard(model, fs.plan(model, mesh))
    opt = fs.optimizer(torch.optim.SGD, lr=0.02, momentum=0.9)

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads, loss = fs.grad_and_value(lambda p: loss_of(model, fs.gather(p), x, y))(params)
        return *opt.step(params, grads=grads, state=state), fs.collectives.pmean(loss, mesh)

    state, losses = opt.init(params), []
    for x, y in batches():
        params, state, loss = step(params, state, *mesh.split((x, y)))
        losses.append(loss.flatten()[0].item())
    return losses, fs.gather(params)


def batches() -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(12, 8, generator=generator, dtype=torch.float64).split((5, 3), 1) for _ in range(8)]


def train_unsharded() -> tuple[list[float], dict[str, Tensor]]:
    """The plain torch loop that everything is compared to."""
    model, losses = awkward(), []
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)
    for x, y in batches():
        loss = ((model(x) - y) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", [*simulated(2, 3), *gloo(2, 3)], ids=str)
def test_gloo_ranks_simulated_ranks_and_a_plain_loop_train_alike(ranks: Ranks) -> None:
    expected_losses, values = train_unsharded()
    assert expected_losses[-1] < 0.8 * expected_losses[0]
    for losses, full in ranks.run(train):
        assert losses == pytest.approx(expected_losses, abs=1e-10)
        assert_trees_close(dict(full), values, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_training_steps_are_differentiated_through_with_the_sum_reduction(num_ranks: int) -> None:
    # MAML and gradient penalties: the sum over ranks of losses divided by the ranks, an exact map at every order
    mesh, model = fs.simulated_mesh(num_ranks), two_layers().double()
    params = fs.shard(model, fs.plan(model, mesh, reduction="sum"))
    x, y = torch.randn(2 * num_ranks, 5).double(), torch.randn(2 * num_ranks, 3).double()

    def adapted(p: Any, x: Tensor, y: Tensor) -> Tensor:
        def loss(p: Any) -> Tensor:
            return loss_of(model, fs.gather(p), x, y) / mesh.size

        inner: Any = optree.tree_map(lambda a, b: a - 0.1 * b, p, fs.grad(loss)(p))
        penalty = sum((g**2).sum() for g in fs.gather(fs.grad(loss)(p)).values()) / mesh.size
        return loss(inner) + penalty

    def unsharded(p: Any) -> Tensor:
        grads = torch.func.grad(lambda p: loss_of(model, p, x, y))(p)
        return loss_of(model, {n: p[n] - 0.1 * grads[n] for n in p}, x, y) + sum((g**2).sum() for g in grads.values())

    actual = mesh.spmd(lambda p, x, y: fs.grad(adapted)(p, x, y))(params, *mesh.split((x, y)))
    values = {name: p.detach() for name, p in model.named_parameters()}
    assert_trees_close(dict(fs.gather(actual)), torch.func.grad(unsharded)(values), rtol=1e-10, atol=1e-10)


def samples() -> tuple[Tensor, Tensor]:
    return torch.arange(20.0).view(4, 5).sin(), torch.arange(12.0).view(4, 3).cos()


def plain_autograd(mesh: fs.Mesh, recompute: bool) -> fs.Sharded:
    model = two_layers()
    params: Any = fs.shard(model, fs.plan(model, mesh))
    leaves: Any = optree.tree_map(lambda x: x.requires_grad_(), params)
    x, y = mesh.split(samples())

    def loss(leaves: fs.Sharded) -> Tensor:
        return loss_of(model, fs.gather(leaves), x, y)

    (checkpoint(loss, leaves, use_reentrant=False) if recompute else loss(leaves)).backward()
    return fs.Sharded({key: leaf.grad for key, leaf in leaves.items()}, params.layout)


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_plain_backward_and_checkpointing_reduce_the_gradients_too(recompute: bool, ranks: Ranks) -> None:
    results = ranks.run(plain_autograd, recompute)
    model = two_layers()
    loss_of(model, dict(model.named_parameters()), *samples()).backward()
    actual = whole_of(optree.tree_map(lambda *rows: torch.stack(rows), *results))
    assert_trees_close(actual, {name: p.grad for name, p in model.named_parameters()})


def handles(mesh: fs.Mesh) -> tuple[fs.Sharded, str]:
    model = two_layers()
    params = fs.shard(model, fs.plan(model, mesh))
    copied = copy.deepcopy(params)
    assert copied.layout.mesh is mesh
    assert_trees_close(fs.gather(copied), fs.gather(params), rtol=0, atol=0)
    thawed = pickle.loads(pickle.dumps(params))
    error = text_of(fs.gather, thawed)
    assert_trees_close(fs.gather(thawed.on(mesh)), fs.gather(params), rtol=0, atol=0)
    return params, error


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_a_pickled_tree_leaves_its_ranks_behind_and_can_be_put_on_others(ranks: Ranks) -> None:
    (first, error), (second, _) = ranks.run(handles)
    assert error.startswith("RuntimeError: ")
    assert "its ranks are not here" in error
    stacked = fs.Sharded({key: torch.stack([first[key], second[key]]) for key in first}, first.layout)
    values = {name: p.detach() for name, p in two_layers().named_parameters()}
    assert_trees_close(dict(fs.gather(stacked.on(fs.simulated_mesh(2)))), values, rtol=0, atol=0)


def saved(mesh: fs.Mesh) -> dict[str, bool]:
    """Whether what ``torch.load`` gives of a lazy Full has the values of the model."""
    model, file = two_layers(), io.BytesIO()
    torch.save(fs.gather(fs.shard(model, fs.plan(model, mesh)), lazy=True), file)
    file.seek(0)
    pairs = zip(torch.load(file).items(), model.parameters(), strict=True)
    return {name: torch.equal(x, p) for (name, x), p in pairs}


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_a_lazy_full_that_torch_saved_is_a_state_dict(ranks: Ranks) -> None:
    assert ranks.run(saved) == [dict.fromkeys(two_layers().state_dict(), True)] * 2


def wrong_trees(mesh: fs.Mesh) -> list[str]:
    model = two_layers()
    params = fs.shard(model, fs.plan(model, mesh, align_bytes=0))
    other = fs.Sharded({key: torch.cat([x, x]) for key, x in params.items()}, params.layout)
    full = fs.gather(params)
    errors = [
        text_of(fs.gather, other),
        text_of(fs.gather, full),
        text_of(fs.scatter_grads, params),
        text_of(fs.scatter_grads, {"0.weight": full["0.weight"]}, params.layout),
        text_of(functional_call, model, {"0.weight": full["0.bias"]}, (torch.zeros(5),)),
    ]
    dist.barrier()  # nobody is left in a collective
    return errors


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_bad_input_is_refused_on_every_rank_before_anything_is_sent(ranks: Ranks) -> None:
    first, second = ranks.run(wrong_trees)
    assert first == second
    assert all(first)
    assert "'0': got shape (42,), torch.float32, expected (21,), torch.float32 (42 elements / 2 shards)" in first[0]
    assert "Expected the shards of one rank" in first[0]
    assert "it is whole already" in first[1]
    assert "these are sharded already" in first[2]
    assert "'2.bias': missing" in first[3]
