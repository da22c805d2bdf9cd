"""Ensembles by ``stack_module_state``: sharded with their members, under vmap, jvp and autocast as unsharded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, stack_module_state, vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import on_meta
from tests.support.ranks import HYBRID, Ranks, gloo, simulated

MEMBERS = 3


def head() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def heads() -> list[nn.Module]:
    torch.manual_seed(0)
    return [head() for _ in range(MEMBERS)]


BASE = on_meta(head)


def predicted(params: Any, x: Tensor) -> Tensor:
    """(members, samples, out), by one head without values."""
    return vmap(lambda p, x: functional_call(BASE, p, (x,)), (0, None))(params, x)


def with_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return fn(*args)

    return run


DERIVED: dict[str, Callable[..., Any]] = {
    "outputs": lambda of, p, v, x: of(p, x),
    "jvp by parameters": lambda of, p, v, x: jvp(lambda p: of(p, x), (p,), (v,))[1],
    "jvp by inputs": lambda of, p, v, x: jvp(lambda x: of(p, x), (x,), (x.cos(),))[1],
    "gradient by inputs": lambda of, p, v, x: torch.func.grad(lambda x: of(p, x).square().sum())(x),
}


def values() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    stacked, _ = stack_module_state(heads())
    params = {name: x.detach() for name, x in stacked.items()}
    return params, {name: x.sin() for name, x in params.items()}


def on_mesh(mesh: fs.Mesh, task: str, autocast: bool) -> Any:
    layout = fs.plan(values()[0], mesh)
    params, v = (fs.shard(tree, layout) for tree in values())
    x = mesh.split(samples(mesh.size))
    of = lambda p, x: predicted(fs.gather(p), x)  # noqa: E731
    run = with_autocast(of) if autocast else of
    return mesh.spmd(lambda p, v, x: DERIVED[task](run, p, v, x))(params, v, x)


def samples(num_ranks: int) -> Tensor:
    return torch.randn(4 * num_ranks, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("ranks", [*simulated(3, HYBRID), *gloo(2)], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("task", DERIVED)
def test_an_ensemble_is_that_of_unsharded_members(task: str, autocast: bool, ranks: Ranks) -> None:
    run = with_autocast(predicted) if autocast else predicted
    params, v = values()
    rows = samples(ranks.size).chunk(ranks.size)
    for actual, x in zip(ranks.run(on_mesh, task, autocast), rows, strict=True):
        tolerance = 2e-2 if autocast else 1e-5
        assert_trees_close(actual, DERIVED[task](run, params, v, x), rtol=tolerance, atol=tolerance)


def gradient(mesh: fs.Mesh) -> fs.Full:
    params = fs.shard(values()[0], fs.plan(values()[0], mesh))
    loss = lambda p, x: predicted(fs.gather(p), x).square().mean()  # noqa: E731
    return fs.gather(mesh.spmd(fs.grad(loss))(params, mesh.split(samples(mesh.size))), lazy=False)


@pytest.mark.parametrize("ranks", [*simulated(3, HYBRID), *gloo(2)], ids=str)
def test_members_train_on_the_mean_over_ranks(ranks: Ranks) -> None:
    expected = torch.func.grad(lambda p: predicted(p, samples(ranks.size)).square().mean())(values()[0])
    for result in ranks.run(gradient):
        assert_trees_close(dict(result), expected)
