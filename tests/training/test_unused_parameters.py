"""Parameters that a step does not use: zeros, as torch.func.grad and JAX have it, and left alone by who says None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import HYBRID, Ranks, gloo, simulated

OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
IDLE = ("idle.weight", "idle.bias")


class Partly(nn.Module):
    """Of two layers it uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.idle = nn.Linear(3, 5).double(), nn.Linear(3, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).square().mean()


def inputs(mesh: fs.Mesh) -> Tensor:
    return torch.arange(mesh.size * 6, dtype=torch.float64).reshape(-1, 3).sin()


def gradients(mesh: fs.Mesh, everyone: bool) -> tuple[fs.Sharded, fs.Sharded]:
    """Parameters and gradients of a step in which no rank uses the idle layer, or all ranks but the first do."""
    model = Partly()
    params = fs.shard(model, fs.plan(model, mesh))
    uses = (torch.arange(2 * mesh.size) >= 2).double() * everyone

    def loss(params: fs.Sharded, x: Tensor, uses: Tensor) -> Tensor:
        full = fs.gather(params)
        if not everyone:
            return functional_call(model, full, (x,))
        also = nn.functional.linear(x, full["idle.weight"], full["idle.bias"]).square()
        return functional_call(model, full, (x,)) + (also * uses[:, None]).mean()

    return params, mesh.spmd(fs.grad(loss))(params, *mesh.split((inputs(mesh), uses)))


def stepped(params: fs.Sharded, grads: fs.Sharded, num_steps: int = 3) -> dict[str, Tensor]:
    mesh, opt = params.layout.mesh, fs.optimizer(torch.optim.AdamW, **OPTIONS)
    state = mesh.spmd(opt.init)(params)
    for _ in range(num_steps):
        params, state = mesh.spmd(lambda p, g, s: opt.step(p, grads=g, state=s))(params, grads, state)
    return dict(fs.gather(params, lazy=False))


def by_torch(grads: Mapping[str, Tensor | None], num_steps: int = 3) -> dict[str, Tensor]:
    model = Partly()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for _ in range(num_steps):
        for name, param in model.named_parameters():
            param.grad = grads[name]
        optimizer.step()
    return {name: x.detach() for name, x in model.named_parameters()}


def without(grads: fs.Sharded, *units: str) -> fs.Sharded:
    return fs.Sharded({key: None if key in units else x for key, x in grads.items()}, grads.layout)


def assert_unused_is_zeros_and_none_is_left_alone(mesh: fs.Mesh) -> fs.Sharded:
    params, grads = gradients(mesh, everyone=False)
    assert not grads["idle"].any()
    full: dict[str, Any] = dict(fs.gather(grads, lazy=False))
    assert_trees_close(stepped(params, grads), by_torch(full), rtol=1e-12, atol=1e-13)  # zeros: AdamW decays
    alone = stepped(params, without(grads, "idle"))
    assert_trees_close(alone, by_torch({**full, **dict.fromkeys(IDLE)}), rtol=1e-12, atol=1e-13)
    assert_trees_close({k: alone[k] for k in IDLE}, {k: dict(Partly().named_parameters())[k].detach() for k in IDLE})
    return grads


def assert_what_some_ranks_use_is_the_mean_with_zeros(mesh: fs.Mesh) -> fs.Sharded:
    _, grads = gradients(mesh, everyone=True)
    model, x = Partly(), inputs(mesh)
    ((nn.functional.linear(x, model.idle.weight, model.idle.bias).square().mean(1))[2:].sum() / len(x)).backward()
    full = fs.gather(grads, lazy=False)
    expected = {name: x.grad for name, x in model.named_parameters() if name in IDLE}
    assert_trees_close({name: full[name] for name in IDLE}, expected, rtol=1e-12, atol=1e-13)
    return grads


@pytest.mark.parametrize("ranks", [*simulated(1, 2, 3, HYBRID), *gloo(3)], ids=str)
def test_unused_parameters_have_zeros_which_adamw_decays_and_none_which_it_skips(ranks: Ranks) -> None:
    ranks.run(assert_unused_is_zeros_and_none_is_left_alone)


@pytest.mark.parametrize("ranks", [*simulated(2, 3), *gloo(3)], ids=str)
def test_what_some_ranks_use_is_the_mean_with_zeros_of_the_others(ranks: Ranks) -> None:
    ranks.run(assert_what_some_ranks_use_is_the_mean_with_zeros)
