"""An ``autograd.Function`` that calls a module in its backward: right with bind, refused under functional_call."""

from __future__ import annotations

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


def data() -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def solved(mesh: fs.Mesh) -> tuple[list[str], list[fs.Full]]:
    """What is said to functional_call; gradients with bind, with real ranks by backward() too."""
    torch.manual_seed(0)
    model = Solved()
    params, x = fs.shard(model, fs.plan(model, mesh)), mesh.split(data())
    model = Solved()  # with other values
    losses: list[Any] = [
        lambda p, x, lazy=lazy: functional_call(model, dict(fs.gather(p, lazy=lazy)), (x,)).square().mean()
        for lazy in (None, False)
    ]
    texts = [text_of(mesh.spmd(fs.grad(loss)), params, x) for loss in losses]
    results = [mesh.spmd(fs.grad(lambda p, x: fs.bind(model, p)(x).square().mean()))(params, x)]
    if not mesh.is_simulated:
        leaves = fs.Sharded({key: x.clone().requires_grad_() for key, x in params.items()}, params.layout)
        fs.bind(model, leaves)(x).square().mean().backward()
        results.append(fs.Sharded({key: x.grad for key, x in leaves.items()}, params.layout))
    return texts, [fs.gather(grads, lazy=False) for grads in results]


@pytest.mark.parametrize("ranks", [*sequential(2), *gloo(2)], ids=str)
def test_parameters_in_backward_are_the_given_ones_with_bind_and_else_refused_by_name(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = Solved()
    model.net(data()).square().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for texts, results in ranks.run(solved):
        for text in texts:
            assert "RuntimeError: grad: backward differentiates a module's own parameter of shape" in text
            assert "functorch_shard.bind(model, params)(...)" in text
        for grads in results:
            assert_trees_close(dict(grads), expected, rtol=1e-10, atol=1e-12)
