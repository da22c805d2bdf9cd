"""Models that step their own parameters while they run, as torchopt's ``MetaSGD`` does: gradients through the steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as torch_pytree

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import two_layers
from tests.support.ranks import Ranks


class Stepped(nn.Module):
    """The loss after two steps on the same data; containers of parameters are flattened as a pytree."""

    def __init__(self, registry: str) -> None:
        super().__init__()
        self.net, self.registry = two_layers((5, 7, 3)).double(), registry

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            containers = tuple(m._parameters for m in self.net if m._parameters)
            flat, unflatten = _flattened(containers, self.registry)
            grads = torch.autograd.grad(self._loss(x), flat, create_graph=True)
            stepped = unflatten([p - 0.1 * g for p, g in zip(flat, grads, strict=True)])
            for container, new in zip(containers, stepped, strict=True):
                container.update(new)
        return self._loss(x)

    def _loss(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def _flattened(tree: Any, registry: str) -> tuple[list[Tensor], Callable[[Any], Any]]:
    if registry == "optree":
        leaves, treedef = optree.tree_flatten(tree)
        return leaves, treedef.unflatten
    leaves, spec = torch_pytree.tree_flatten(tree)
    return leaves, partial(torch_pytree.tree_unflatten, treespec=spec)


def gradient(mesh: fs.Mesh, registry: str, lazy: bool | None) -> fs.Full:
    torch.manual_seed(0)
    model = Stepped(registry)
    params = fs.shard(model, fs.plan(model, mesh))
    of_rank = fs.grad(lambda params, x: functional_call(model, fs.gather(params, lazy=lazy), (x,)))
    return fs.gather(mesh.spmd(of_rank)(params, mesh.split(data())), lazy=False)


def data() -> Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def expected(num_ranks: int) -> dict[str, Tensor]:
    """The mean over ranks, each of which steps on its own data."""
    total: dict[str, Tensor] = {}
    for x in data().chunk(num_ranks):
        torch.manual_seed(0)
        model = Stepped("optree")  # as it is: its parameters are replaced by the steps
        own = dict(model.named_parameters())
        grads = torch.autograd.grad(model(x), [*own.values()])
        total = {name: total.get(name, 0) + g / num_ranks for name, g in zip(own, grads, strict=True)}
    return total


@pytest.mark.parametrize("lazy", [None, False], ids=["lazy", "plain"])
@pytest.mark.parametrize("registry", ["optree", "torch"])
def test_the_gradient_is_that_through_the_steps_of_the_module_itself(
    ranks: Ranks, registry: str, lazy: bool | None
) -> None:
    for result in ranks.run(gradient, registry, lazy):
        assert_trees_close(dict(result), expected(ranks.size), rtol=1e-10, atol=1e-12)
