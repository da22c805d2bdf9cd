"""Models that a sharding library would rather not meet, and numbers for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs


class Norm(nn.Module):
    """Layer normalization spelled out: grad over jvp of torch's own is wrong in torch itself (2.13)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight + self.bias


class Block(nn.Module):
    """A residual block with a scalar parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.fc = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.fc(self.norm(x)).tanh()


class Awkward(nn.Module):
    """Scalars, an empty tensor, tied weights across units, and frozen, integer and bool parameters."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.inp = nn.Linear(5, width)
        first, second = Block(width), Block(width)
        second.fc.weight = first.fc.weight
        self.blocks = nn.ModuleList([first, second])
        self.out = nn.Linear(width, 3)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.rand(width) + 0.5, requires_grad=False)
        self.steps = nn.Parameter(torch.tensor(2), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(width) != 1, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.scale * self.out(x * self.frozen * self.mask * self.steps) + self.empty.sum()


def awkward(seed: int = 0) -> Awkward:
    """In float64, with the same values wherever it is made."""
    torch.manual_seed(seed)
    return Awkward().double()


def loss_of(model: nn.Module, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return ((functional_call(model, parameters, (x,)) - y) ** 2).mean()


def two_layers(sizes: tuple[int, int, int] = (5, 7, 3), seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.GELU(), nn.Linear(sizes[1], sizes[2]))


def equal_units() -> nn.Sequential:
    """Five of nearly one size, none small beside the others, and no two of the same: sizes tell them apart."""
    torch.manual_seed(0)
    widths = [12, 13, 14, 15, 16]
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, n), nn.Tanh(), nn.Linear(n, 5)) for n in widths)).double()


def draws(seed: int, dtype: torch.dtype = torch.float64) -> Callable[..., Tensor]:
    """Draws one tensor after the other, of normal numbers, each of the shape it is given."""
    return partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def on_meta(make: Callable[[], nn.Module]) -> Any:
    """A module without values."""
    with torch.device("meta"):
        return make()


def initialized(model: nn.Module, seed: int = 0) -> fs.Full:
    """Whole parameters for a module without values."""
    return fs.gather(fs.init(model, fs.plan(model, fs.simulated_mesh(1)), seed=seed)[0])
