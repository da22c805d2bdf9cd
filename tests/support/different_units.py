"""Training in which ranks use different units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

LARGE, SMALL = 320, 24  # widths: 0.8 MB a unit in float64, and 4.8 KB

Uses = Callable[[int, int], list[int]]  # the units that a rank uses in a step


class Units(nn.Module):
    """Uses those of its units that it is told to."""

    def __init__(self, num_units: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(nn.Linear(width, width) for _ in range(num_units)).double()

    def forward(self, x: Tensor, uses: list[int]) -> Tensor:
        for i in uses:
            x = x + self.units[i](x).tanh() / 4
        return x.square().mean()


def inputs_of(width: int, rank: int, step: int) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def trained_without_shards(num_units: int, width: int, num_ranks: int, uses: Uses, steps: int) -> dict[str, Tensor]:
    model = Units(num_units, width)
    params = {name: x.detach() for name, x in model.named_parameters()}
    for step in range(steps):
        batches = [(inputs_of(width, rank, step), uses(rank, step)) for rank in range(num_ranks)]

        def loss(p: Any, batches: Any = batches) -> Tensor:
            return torch.stack([functional_call(model, p, batch) for batch in batches]).sum() / num_ranks

        grads = torch.func.grad(loss)(params)
        params = {name: x - 5 * grads[name] for name, x in params.items()}
    return params


def train(
    mesh: fs.Mesh, num_units: int, width: int, uses: Uses, steps: int, lazy: bool | None = None, **options: Any
) -> dict[str, Tensor]:
    model = Units(num_units, width)
    params = fs.shard(model, fs.plan(model, mesh, **options))
    for step in range(steps):
        x, used = inputs_of(width, mesh.rank, step), uses(mesh.rank, step)
        grads = fs.grad(lambda p, x=x, used=used: functional_call(model, fs.gather(p, lazy=lazy), (x, used)))(params)
        params = fs.Sharded({key: x - 5 * grads[key] for key, x in params.items()}, params.layout)
    return {name: x.clone() for name, x in fs.gather(params, lazy=False).items()}


def alternately(rank: int, step: int) -> list[int]:
    return [0, 1] if rank == step % 2 else [0]


def assert_trained(results: list[dict[str, Tensor]], num_units: int, width: int, uses: Uses, steps: int) -> None:
    expected = trained_without_shards(num_units, width, len(results), uses, steps)
    for result in results:
        fs.testing.assert_trees_close(result, expected, rtol=1e-12, atol=1e-14)
