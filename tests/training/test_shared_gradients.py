"""The mean over ranks is taken once of each gradient, also where autograd hands one tensor to several inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import Ranks, gloo


def added(a: Any, b: Any) -> Any:
    return optree.tree_map(torch.add, a, b)


def of_sum(base: Any, delta: Any, x: Tensor, whole: Callable[..., Any]) -> Tensor:
    return (whole(added(base, delta))["w"] ** 2 * x).sum(-1).mean()


def in_several_gathers(base: Any, delta: Any, x: Tensor, whole: Callable[..., Any]) -> Tensor:
    one, other, both = whole(base), whole(base, lazy=False), whole(added(added(base, base), delta))
    return (one["w"] * other["w"] * both["w"] * x).sum(-1).mean()


def with_a_hook(base: Any, delta: Any, x: Tensor, whole: Callable[..., Any]) -> Tensor:
    for part in base.values():
        part.register_hook(lambda grad: 3 * grad)
    return (whole(base)["w"] ** 2 * x).sum(-1).mean() + of_sum(base, delta, x, whole)


def gradients(mesh: fs.Mesh, loss: Callable[..., Tensor]) -> list[dict[str, Tensor]]:
    """By both trees, whole."""
    generator = torch.Generator().manual_seed(0)
    base, delta, rows = (torch.randn(n, 5, generator=generator).double() for n in (1, 1, 4))
    trees = [{"w": base[0]}, {"w": delta[0]}]
    if mesh.size == 1:
        expected = torch.func.grad(lambda a, b: loss(a, b, rows, lambda p, **_: p), (0, 1))(*trees)
        return [*expected]
    layout = fs.plan(trees[0], mesh)
    sharded = [fs.shard(tree, layout) for tree in trees]
    grads = mesh.spmd(fs.grad(lambda a, b, x: loss(a, b, x, fs.gather), (0, 1)))(*sharded, mesh.split(rows))
    return [dict(fs.gather(tree, lazy=False)) for tree in grads]


@pytest.mark.parametrize("ranks", gloo(2, {"replicate": 2, "shard": 2}), ids=str)
@pytest.mark.parametrize("loss", [of_sum, in_several_gathers, with_a_hook])
def test_each_gradient_is_that_of_the_unsharded_program(loss: Callable[..., Tensor], ranks: Ranks) -> None:
    expected = gradients(fs.init_mesh(), loss)
    for grads in ranks.run(gradients, loss):
        assert_trees_close(grads, expected, rtol=1e-12, atol=1e-12)
