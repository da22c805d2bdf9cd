"""Real gloo ranks: the same derivatives as the unsharded model, the same losses as simulated ranks and a plain loop."""

from __future__ import annotations

import copy
import pickle
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
from tests.support.models import awkward, loss_of, two_layers
from tests.support.pool import run_ranks


def derivatives_on_this_rank(axes: dict[str, int], reduction: str) -> dict[str, Any]:
    mesh = fs.init_mesh(axes)
    return on_mesh(mesh, Data(mesh.size), list(ON_RANK), reduction=reduction)


@pytest.mark.parametrize(
    ("axes", "reduction"),
    [({"shard": 2}, "mean"), ({"shard": 3}, "mean"), ({"shard": 2}, "sum"), ({"replicate": 2, "shard": 2}, "mean")],
    ids=str,
)
def test_every_derivative_is_that_of_the_unsharded_model(axes: dict[str, int], reduction: str) -> None:
    num_ranks = fs.simulated_mesh(axes).size
    results = run_ranks(derivatives_on_this_rank, num_ranks, axes, reduction)
    for task in ON_RANK:
        rows: Any = optree.tree_map(lambda *leaves: torch.stack(leaves), *(result[task] for result in results))
        if task not in LOCAL:
            stacked = {key: x.unflatten(0, tuple(axes.values())) for key, x in rows.items()}
            rows = whole(fs.Sharded(stacked, rows.layout), axes.get("replicate", 1))
        actual = dict(rows) if isinstance(rows, dict) else rows
        assert_trees_close({task: actual}, {task: expected(task, Data(num_ranks), reduction)}, rtol=1e-10, atol=1e-10)


def train(mesh: fs.Mesh, num_steps: int = 8) -> tuple[list[float], fs.Full]:
    """SGD with momentum on a model of awkward parameters: losses, and the final parameters."""
    model = awkward()
    params = fs.shard(model, fs.plan(model, mesh))
    opt = fs.optimizer(torch.optim.SGD, lr=0.02, momentum=0.9)

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads, loss = fs.grad_and_value(lambda p: loss_of(model, fs.gather(p), x, y))(params)
        return *opt.step(params, grads=grads, state=state), fs.collectives.pmean(loss, mesh)

    state, losses = opt.init(params), []
    for x, y in batches(num_steps):
        params, state, loss = step(params, state, *mesh.split((x, y)))
        losses.append(loss.flatten()[0].item())
    return losses, fs.gather(params)


def batches(num_steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    draw = lambda n: torch.randn(12, n, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(5), draw(3)) for _ in range(num_steps)]


def train_on_this_rank() -> tuple[list[float], fs.Full]:
    return train(fs.init_mesh())


def train_unsharded(num_steps: int = 8) -> tuple[list[float], dict[str, Tensor]]:
    """The plain torch loop that everything is held to."""
    model, losses = awkward(), []
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)
    for x, y in batches(num_steps):
        loss = ((model(x) - y) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gloo_ranks_simulated_ranks_and_a_plain_loop_train_alike(num_ranks: int) -> None:
    losses, values = train_unsharded()
    assert losses[-1] < 0.8 * losses[0]
    for real_losses, full in run_ranks(train_on_this_rank, num_ranks):
        assert real_losses == pytest.approx(losses, abs=1e-10)
        assert_trees_close(dict(full), values, rtol=1e-10, atol=1e-10)
    simulated_losses, full = train(fs.simulated_mesh(num_ranks))
    assert simulated_losses == pytest.approx(losses, abs=1e-10)
    assert_trees_close(dict(full), values, rtol=1e-10, atol=1e-10)


def plain_autograd_on_this_rank(recompute: bool) -> fs.Sharded:
    mesh, model = fs.init_mesh(), two_layers()
    params: Any = fs.shard(model, fs.plan(model, mesh))
    leaves: Any = optree.tree_map(lambda x: x.requires_grad_(), params)
    x, y = mesh.split((torch.arange(20.0).view(4, 5).sin(), torch.arange(12.0).view(4, 3).cos()))
    loss = lambda leaves: loss_of(model, fs.gather(leaves), x, y)  # noqa: E731
    (checkpoint(loss, leaves, use_reentrant=False) if recompute else loss(leaves)).backward()
    return fs.Sharded({key: leaf.grad for key, leaf in leaves.items()}, params.layout)


@pytest.mark.parametrize("recompute", [False, True])
def test_plain_backward_and_checkpointing_reduce_the_gradients_too(recompute: bool) -> None:
    results = run_ranks(plain_autograd_on_this_rank, 2, recompute)
    rows = fs.Sharded({key: torch.stack([r[key] for r in results]) for key in results[0]}, results[0].layout)
    model = two_layers()
    loss_of(
        model, dict(model.named_parameters()), torch.arange(20.0).view(4, 5).sin(), torch.arange(12.0).view(4, 3).cos()
    ).backward()
    assert_trees_close(whole(rows), {name: p.grad for name, p in model.named_parameters()})


def handles_on_this_rank() -> tuple[fs.Sharded, str]:
    mesh, model = fs.init_mesh(), two_layers()
    params = fs.shard(model, fs.plan(model, mesh))
    copied = copy.deepcopy(params)
    assert copied.layout.mesh is mesh
    assert_trees_close(fs.gather(copied), fs.gather(params), rtol=0, atol=0)
    thawed = pickle.loads(pickle.dumps(params))
    try:
        fs.gather(thawed)
    except RuntimeError as error:
        again = thawed.on(mesh)
        assert_trees_close(fs.gather(again), fs.gather(params), rtol=0, atol=0)
        return params, str(error)
    raise AssertionError("gathered without ranks")


def test_a_pickled_tree_leaves_its_ranks_behind_and_can_be_put_on_others() -> None:
    results = run_ranks(handles_on_this_rank, 2)
    assert "its ranks are not here" in results[0][1]
    stacked = {key: torch.stack([tree[key] for tree, _ in results]) for key in results[0][0]}
    layout = results[0][0].layout.on(fs.simulated_mesh(2))
    values = {name: p.detach() for name, p in two_layers().named_parameters()}
    assert_trees_close(dict(fs.gather(fs.Sharded(stacked, layout))), values, rtol=0, atol=0)


def wrong_trees_on_this_rank() -> list[str]:
    mesh, model = fs.init_mesh(), two_layers()
    params = fs.shard(model, fs.plan(model, mesh, align_bytes=0))
    other = fs.Sharded({key: torch.cat([x, x]) for key, x in params.items()}, params.layout)
    full, wrong = fs.gather(params), []
    for call in (
        lambda: fs.gather(other),
        lambda: fs.gather(full),  # pyright: ignore[reportArgumentType]
        lambda: fs.scatter_grads(params),
        lambda: fs.scatter_grads({"0.weight": full["0.weight"]}, params.layout),
        lambda: functional_call(model, {"0.weight": full["0.bias"]}, (torch.zeros(5),)),
    ):
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            wrong.append(str(error))
    dist.barrier()  # nobody is left in a collective
    return wrong


def test_bad_input_is_refused_on_every_rank_before_anything_is_sent() -> None:
    first, second = run_ranks(wrong_trees_on_this_rank, 2)
    assert first == second
    assert len(first) == 5
    assert "'0': got shape (42,), torch.float32, expected (21,), torch.float32 (42 elements / 2 shards)" in first[0]
    assert "Expected the shards of one rank" in first[0]
    assert "it is whole already" in first[1]
    assert "these are sharded already" in first[2]
    assert "'2.bias': missing" in first[3]
