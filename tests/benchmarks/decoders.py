"""What the GPU benchmark trains: a GPT-2 of 124 million parameters, and a Llama of a billion."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.workloads import Workload


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder: as GPT-2, with learned positions and LayerNorm, or as Llama, rotary with RMSNorm."""

    name: str
    depth: int
    width: int
    heads: int
    groups: int  # of heads that share keys and values
    hidden: int
    vocabulary: int
    context: int
    rotary: bool


SHAPES = [
    Shape("GPT-2 124M", 12, 768, 12, 12, 3072, 50304, 1024, rotary=False),  # the vocabulary rounded up, as in nanoGPT
    Shape("Llama 1B", 16, 2048, 32, 8, 8192, 128256, 1024, rotary=True),  # Llama 3.2
]


def toy(shape: Shape) -> Shape:
    groups = 1 if shape.rotary else 2
    return replace(shape, depth=2, width=32, heads=2, groups=groups, hidden=64, vocabulary=96, context=16)


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        norm, self.shape, self.size = nn.RMSNorm if s.rotary else nn.LayerNorm, s, s.width // s.heads
        self.norm_1, self.norm_2 = norm(s.width), norm(s.width)
        self.qkv = nn.Linear(s.width, (s.heads + 2 * s.groups) * self.size, bias=not s.rotary)
        self.proj = nn.Linear(s.width, s.width, bias=not s.rotary)
        self.up = nn.Linear(s.width, 2 * s.hidden if s.rotary else s.hidden, bias=not s.rotary)
        self.down = nn.Linear(s.hidden, s.width, bias=not s.rotary)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        s = self.shape
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.size)).transpose(1, 2)  # (B, H + 2G, T, D)
        q, k, v = heads.split([s.heads, s.groups, s.groups], 1)
        if turns is not None:
            q, k = rotated(q, turns), rotated(k, turns)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.groups < s.heads)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y = self.up(self.norm_2(x))
        return x + self.down(gated(*y.chunk(2, -1)) if s.rotary else F.gelu(y, approximate="tanh"))


def gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * F.silu(gate)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-b, a], -1) * turns[1]


class Decoder(nn.Module):
    """Blocks between an embedding and a head that are one matrix, which is one parameter."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape, self.embed = s, nn.Embedding(s.vocabulary, s.width)
        self.position = None if s.rotary else nn.Embedding(s.context, s.width)
        self.blocks = nn.ModuleList([Block(s) for _ in range(s.depth)])
        self.norm = (nn.RMSNorm if s.rotary else nn.LayerNorm)(s.width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x, turns = self.embed(tokens), None
        if self.position is None:
            turns = self._turns(x)
        else:
            x = x + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x, turns)
        return F.linear(self.norm(x), self.embed.weight)

    def _turns(self, x: Tensor) -> Tensor:
        size = self.shape.width // self.shape.heads
        rates = 500_000.0 ** -(torch.arange(0, size, 2, device=x.device) / size)
        angles = (torch.arange(x.shape[1], device=x.device)[:, None] * rates).repeat(1, 2)  # (T, D)
        return torch.stack([angles.cos(), angles.sin()]).to(x.dtype)


def workload(shape: Shape, device: torch.device) -> Workload:
    """The model, made on the device; a batch is rows of ``shape.context`` tokens, the same for every contender."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        with device:
            return Decoder(shape).to(torch.bfloat16)

    def batch(rank: int, rows: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(shape.vocabulary, (rows, shape.context + 1), generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload(model, batch, loss_of)


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
