"""A gather inside of a vmap over models, lazy and plain: batch dims stay in front, in forward and in backward."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import jvp, vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import Ranks, gloo


def mean_over_models(p: Any, whole: Any) -> Tensor:
    both = optree.tree_map(lambda a: torch.stack([a, 2 * a]), p)
    return vmap(lambda q: whole(q)["w"].sin().sum() * whole(q)["b"].square().sum())(both).mean()


def derivatives(p: Any, whole: Any, grad: Any) -> list[Any]:
    f = lambda p: mean_over_models(p, whole)  # noqa: E731
    return [grad(f)(p), torch.func.grad(f)(p), jvp(grad(f), (p,), (p,))[1]]


def on_mesh(mesh: fs.Mesh, lazy: bool | None) -> tuple[list[Any], list[Any]]:
    values = {"w": torch.linspace(-1, 1, 5).double(), "b": torch.linspace(1, 2, 4).double().view(2, 2)}
    layout = fs.plan(values, mesh, units=[["w", "b"]])
    found = derivatives(fs.shard(values, layout), lambda p: fs.gather(p, lazy=lazy), fs.grad)
    whole = [
        dict(fs.gather(fs.Sharded({k: x.detach() for k, x in tree.items()}, layout), lazy=False)) for tree in found
    ]
    return whole, derivatives(values, lambda p: p, torch.func.grad)


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
@pytest.mark.parametrize("lazy", [None, False])
def test_gradients_of_a_vmap_over_models_are_those_of_whole_parameters(lazy: bool | None, ranks: Ranks) -> None:
    for found, expected in ranks.run(on_mesh, lazy):
        assert_trees_close(found, expected, rtol=1e-12, atol=1e-12)


def complex_parts(mesh: fs.Mesh, lazy: bool | None) -> Tensor:
    values = {"w": torch.ones(1, 1, 2), "b": torch.ones(1)}
    params: Any = fs.shard(values, fs.plan(values, mesh, units=[["w", "b"]]))
    both = optree.tree_map(lambda a: torch.stack([a, 2 * a]), params)
    return vmap(lambda p: torch.view_as_complex(fs.gather(p, lazy=lazy)["w"]).abs().square().sum())(both)


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
@pytest.mark.parametrize("lazy", [None, False])
def test_a_gathered_parameter_of_a_batch_is_contiguous_behind_its_batch(lazy: bool | None, ranks: Ranks) -> None:
    for found in ranks.run(complex_parts, lazy):
        assert_trees_close(found, torch.tensor([2.0, 8.0]))
