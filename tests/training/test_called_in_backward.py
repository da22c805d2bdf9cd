"""An ``autograd.Function`` that calls a module again in its backward finds the module's own parameters: refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import two_layers
from tests.support.ranks import Ranks, gloo, sequential
from tests.support.refusals import text_of


class Adjoint(torch.autograd.Function):
    """Saves inputs alone, as adjoints of solvers and reversible layers do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
            return None, *torch.autograd.grad(y, (x, *parameters), grads, allow_unused=True)


class Solved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = two_layers((5, 7, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return Adjoint.apply(self.net, x.clone().requires_grad_(), *self.net.parameters())


def by_functional_call(model: nn.Module, params: fs.Sharded, x: Tensor) -> Tensor:
    return functional_call(model, fs.gather(params), (x,))


def by_plain_tensors(model: nn.Module, params: fs.Sharded, x: Tensor) -> Tensor:
    return functional_call(model, dict(fs.gather(params, lazy=False)), (x,))


def data() -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


CALLS: list[Callable[..., Tensor]] = [by_functional_call, by_plain_tensors, fs.call]
on_ranks = pytest.mark.parametrize("ranks", [*sequential(2), *gloo(2)], ids=str)


def refusals(mesh: fs.Mesh) -> list[str]:
    model = Solved()
    params, x = fs.shard(model, fs.plan(model, mesh)), mesh.split(data())
    losses = [lambda p, x, call=call: call(model, p, x).square().mean() for call in CALLS]
    return [text_of(mesh.spmd(fs.grad(loss)), params, x) for loss in losses]


@on_ranks
def test_the_modules_own_parameters_in_backward_are_refused_by_name(ranks: Ranks) -> None:
    torch.manual_seed(0)
    for texts in ranks.run(refusals):
        for text in texts:
            assert "RuntimeError: grad: an autograd.Function differentiates a module's own parameter of shape" in text
            assert "functorch_shard.scatter_grads" in text


def by_scatter_grads(mesh: fs.Mesh) -> dict[str, Tensor]:
    """What the error says: whole parameters in the module, and the gradients of its parameters."""
    torch.manual_seed(0)
    model = Solved()
    params = fs.shard(model, fs.plan(model, mesh))
    model = Solved()  # with other values
    full = fs.gather(params, lazy=False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(full[name])
    model(mesh.split(data())).square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return dict(fs.gather(fs.scatter_grads(grads, params.layout), lazy=False))


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_gradients_of_whole_parameters_in_the_module_are_scattered(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = Solved()
    model.net(data()).square().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for grads in ranks.run(by_scatter_grads):
        assert_trees_close(grads, expected, rtol=1e-10, atol=1e-12)


class Scaled(torch.autograd.Function):
    """Uses a parameter of a module that forward did not call, and does not differentiate it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: nn.Module) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.scale(*grads), None


def test_a_backward_may_use_other_modules_that_it_does_not_differentiate() -> None:
    torch.manual_seed(0)
    model, other, mesh = two_layers((5, 7, 5)).double(), nn.Linear(5, 5, bias=False).double(), fs.init_mesh()
    params = fs.shard(model, fs.plan(model, mesh))
    grads = fs.grad(lambda p: Scaled.apply(by_functional_call(model, p, data()), other).sum())(params)
    model(data()).backward(other(torch.ones(6, 5).double()))
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert_trees_close(dict(fs.gather(grads, lazy=False)), expected, rtol=1e-10, atol=1e-12)
