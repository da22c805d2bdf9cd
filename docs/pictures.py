"""The pictures of the documentation: ``python docs/pictures.py`` writes them again, the same on every machine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

PLACE = Path(__file__).parent / "_static"


class Model(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 80), nn.GELU(), nn.Linear(80, 32)) for _ in range(2)]
        self.embed, self.blocks, self.head = nn.Embedding(99, 32), nn.ModuleList(blocks), nn.Linear(32, 99)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def model() -> nn.Module:
    with torch.device("meta"):
        return Model()


def layout() -> str:
    """Which rank holds how much of which parameter, on four ranks."""
    return fs.visualize(fs.plan(model(), fs.abstract_mesh(4), units="blocks")).svg(900)


def step() -> str:
    """What one of four ranks starts, waits for and computes in a gradient."""
    whole, mesh = model(), fs.abstract_mesh(4)
    params = fs.shard(whole, fs.plan(whole, mesh, units="blocks"))

    def loss(params: fs.Sharded, tokens: Tensor) -> Tensor:
        return functional_call(whole, dict(fs.gather(params)), (tokens,)).square().mean()

    tokens = torch.zeros(8, dtype=torch.int64, device="meta")
    return fs.visualize(fs.compile(fs.grad(loss)).trace(params, tokens)).svg(900)


PICTURES = {"layout.svg": layout, "step.svg": step}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (PLACE / name).write_text(picture(), encoding="utf-8")
