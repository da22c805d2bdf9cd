"""``parametrize.cached`` keeps tensors by module: not those of other parameters, nor those of another derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import gloo, on_each, rows_of, simulated

KINDS = [*simulated(2), *gloo(2)]


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


class Twice(nn.Module):
    """One layer with a parametrized weight, used twice, and the weight itself."""

    def __init__(self, remat: bool = False) -> None:
        super().__init__()
        self.layer, self.remat = nn.Linear(4, 4, bias=False, dtype=torch.float64), remat
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(16.0).sin().view(4, 4))
        parametrize.register_parametrization(self.layer, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        layer = fs.remat(self.layer) if self.remat else self.layer
        return layer(layer(x).tanh()).square().mean() + self.layer.weight.square().sum()


Loss = Callable[[fs.Sharded, Tensor], Tensor]
PARTS: dict[str, Callable[[nn.Module], Loss]] = {
    "functional_call": lambda model: lambda params, x: functional_call(model, fs.gather(params), (x,)),
    "bind": lambda model: lambda params, x: fs.bind(model, params)(x),
    "remat of a function": lambda model: fs.remat(lambda params, x: functional_call(model, fs.gather(params), (x,))),
}


def batch(mesh: fs.Mesh) -> Any:
    return rows_of(mesh, torch.arange(12.0 * mesh.size, dtype=torch.float64).cos().view(mesh.size, 3, 4))


@on_each(KINDS)
def test_each_gradient_in_one_context_is_that_without_it(mesh: fs.Mesh) -> None:
    plain = Twice()
    params = fs.shard(plain, fs.plan(plain, mesh))
    expected = gradients(mesh, PARTS["functional_call"](plain), params)
    for model in (plain, Twice(remat=True)):
        for part in PARTS.values():
            assert_trees_close(gradients(mesh, part(model), params, cached=True), expected)
            with parametrize.cached():
                gradients(mesh, part(model), params)
                assert_trees_close(gradients(mesh, part(model), params), expected)


def gradients(mesh: fs.Mesh, loss: Loss, params: fs.Sharded, cached: bool = False) -> Any:
    def both(params: fs.Sharded, x: Tensor) -> Any:
        return fs.grad(loss)(params, x), fs.grad(loss)(params, 2 * x)

    def inside(params: fs.Sharded, x: Tensor) -> Any:
        with parametrize.cached():
            return both(params, x)

    return mesh.spmd(inside if cached else both)(params, batch(mesh))
