"""What the step benchmark trains: a GPT of 27 million parameters, and 200 layers that are all overhead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, DEPTH, VOCABULARY, CONTEXT = 512, 8, 8, 2048, 128


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.norm_1, self.norm_2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """8 blocks of width 512, a vocabulary of 2048, sequences of 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()


class Small(nn.Module):
    """200 residual layers of 64: what a step costs besides arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(200)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return x


@dataclass(frozen=True)
class Workload:
    """A model, one rank's batch, and the loss of it."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]  # of a rank, of so many samples
    loss: Callable[[Tensor, Tensor], Tensor]


def _tokens(rank: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (size, CONTEXT + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _rows(rank: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, 64, generator=generator), torch.randn(size, 64, generator=generator)


WORKLOADS = {
    "gpt": Workload(GPT, _tokens, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())),
    "small": Workload(Small, _rows, lambda out, y: (out.float() - y).square().mean()),
}
