"""A step with frozen parameters is written as one without: the unsharded step, and a frozen unit sends no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.ranks import Ranks, gloo, sequential, simulated

FROZEN, STEPS = ("0.weight", "0.bias", "2.weight"), 3  # a whole unit, and a part of another


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).double()
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 8, dtype=torch.float64, generator=generator)
    return x[:, :5].contiguous(), x[:, 5:].contiguous()


def unsharded() -> dict[str, Tensor]:
    model, (x, y) = build(), batch()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.5)
    for _ in range(STEPS):
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def sharded(mesh: fs.Mesh) -> tuple[fs.Full, list[list[str]], set[str]]:
    """Trained parameters, buffers with state, and buffers whose gradients are sent."""
    model = build()
    params = fs.shard(model, fs.plan(model, mesh, units="blocks"))
    opt = fs.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)

    def step(params: fs.Sharded, state: fs.OptState, x: Tensor, y: Tensor) -> tuple[fs.Sharded, fs.OptState]:
        grads = fs.grad(lambda p: (functional_call(model, fs.gather(p), (x,)) - y).square().mean())(params)
        assert all((grads[key] is None) == (not buffer.trainable) for key, buffer in params.layout.buffers.items())
        return opt.step(params, grads=grads, state=state)

    state = opt.init(params)
    with count_collectives() as seen:
        for _ in range(STEPS):
            params, state = mesh.spmd(step)(params, state, *mesh.split(batch()))
    reduced = {str(one.key) for one in seen.issued if one.kind == "psum_scatter"}
    held = [sorted(tree) for tree in state.values()]
    return fs.gather(params, lazy=False), held, reduced


@pytest.mark.parametrize("ranks", [*simulated(3), *sequential(3), *gloo(2)], ids=str)
def test_a_step_with_frozen_parameters_needs_no_partition_and_sends_no_gradient_of_them(ranks: Ranks) -> None:
    expected, start = unsharded(), dict(build().named_parameters())
    for trained, held, reduced in ranks.run(sharded):
        assert_trees_close(trained, expected, rtol=1e-10, atol=1e-12)
        assert all(torch.equal(trained[name], start[name]) for name in FROZEN)
        assert held == [["2"]] * 3
        assert reduced == {"2"}
