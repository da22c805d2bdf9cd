"""Derivatives inside of derivatives, whose backward runs in other threads than their forward."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from tests.device.ranks import DEVICE, on_device, one_rank, reports

tree_map: Any = optree.tree_map


class Forces(nn.Module):
    """It differentiates by its input inside of its forward, through a part that is recomputed."""

    def __init__(self, recomputed: str) -> None:
        super().__init__()
        self.part, self.out, self.recomputed = nn.Sequential(nn.Linear(4, 16), nn.Tanh()), nn.Linear(16, 1), recomputed

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = fs.remat(self.part)(x) if self.recomputed == "remat" else checkpoint(self.part, x, use_reentrant=False)
        return torch.autograd.grad(self.out(h).sum(), x, create_graph=True)[0]


def forces(recomputed: str) -> list[Any]:
    """Gradients of a loss of forces, on the CPU and on the device."""
    torch.manual_seed(0)
    model, x = Forces(recomputed), torch.randn(4, 4)
    results = []
    for device in ("cpu", DEVICE):
        there, mesh = deepcopy(model).to(device), one_rank(device)
        params = fs.shard(there, fs.plan(there, mesh))
        grads = fs.grad(lambda p, there=there: fs.bind(there, p)(x.to(there.out.weight.device)).square().mean())(params)
        results.append({key: g.cpu() for key, g in grads.items() if g is not None})
    return results


@pytest.mark.parametrize("recomputed", ["remat", "checkpoint"])
def test_a_model_that_differentiates_in_its_forward_recomputes_a_part(recomputed: str) -> None:
    expected, actual = on_device(forces, recomputed)
    assert any(x.abs().sum() > 0 for x in actual.values())
    fs.testing.assert_trees_close(actual, expected)


def scores(mesh: fs.Mesh) -> None:
    """Score matching: the derivative by the input of a part that is recomputed, beside the one that is not."""
    torch.manual_seed(0)
    net, samples = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(mesh.device), torch.randn(8, 4)
    params, x = fs.shard(net, fs.plan(net, mesh)), mesh.split(samples.to(mesh.device))

    def energy(p: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(net, fs.gather(p), (x,)).sum()

    def loss(p: fs.Sharded, energy: Callable[..., Tensor]) -> Tensor:
        y = x.clone().requires_grad_()
        return torch.autograd.grad(energy(p, y), y, create_graph=True)[0].square().mean()

    expected = fs.grad(lambda p: loss(p, energy))(params)
    remat = fs.grad(lambda p: loss(p, fs.remat(energy)))(params)
    inner = fs.grad(lambda p: torch.func.grad(fs.remat(energy), 1)(p, x).square().mean())(params)
    for actual in (remat, inner):
        fs.testing.assert_trees_close(actual, expected)


def test_score_matching_through_remat_is_right_on_ranks_of_the_device() -> None:
    for report in reports(scores, axes={"shard": 2}):
        assert not report.findings
