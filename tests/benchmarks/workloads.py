"""What benchmarks train: decoders, among them a GPT of 27 million parameters, and 200 layers that are all overhead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    rotary: bool = False
    tied: bool = True


GPT = Shape("GPT 27M", 8, 512, 8, 8, 2048, 2048, 128, tied=False)
SHAPES = [  # of the benchmark on GPUs
    Shape("GPT-2 124M", 12, 768, 12, 12, 3072, 50304, 1024),  # the vocabulary rounded up, as in nanoGPT
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

    def forward(self, x: Tensor, turns: Tensor | None = None) -> Tensor:
        s = self.shape
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.size)).transpose(1, 2)  # (B, H + 2G, T, D)
        q, k, v = heads.split([s.heads, s.groups, s.groups], 1)
        if turns is not None:
            q, k = rotated(q, turns), rotated(k, turns)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.groups < s.heads)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y = self.up(self.norm_2(x))
        return x + self.down(gated(*y.chunk(2, -1)) if s.rotary else F.gelu(y))


def gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * F.silu(gate)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-b, a], -1) * turns[1]


class Decoder(nn.Module):
    """Blocks between an embedding and a head, which may be one matrix, and so one parameter."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape, self.embed = s, nn.Embedding(s.vocabulary, s.width)
        self.position = None if s.rotary else nn.Embedding(s.context, s.width)
        self.blocks = nn.ModuleList([Block(s) for _ in range(s.depth)])
        self.norm = (nn.RMSNorm if s.rotary else nn.LayerNorm)(s.width)
        self.head = None if s.tied else nn.Linear(s.width, s.vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x, turns = self.embed(tokens), None
        if self.position is None:
            turns = self._turns(x)
        else:
            x = x + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x, turns)
        x = self.norm(x)
        return self.head(x) if self.head is not None else F.linear(x, self.embed.weight)

    def _turns(self, x: Tensor) -> Tensor:
        size = self.shape.width // self.shape.heads
        rates = 500_000.0 ** -(torch.arange(0, size, 2, device=x.device) / size)
        angles = (torch.arange(x.shape[1], device=x.device)[:, None] * rates).repeat(1, 2)  # (T, D)
        return torch.stack([angles.cos(), angles.sin()]).to(x.dtype)


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


def decoder(shape: Shape, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Workload:
    """The model, made on the device; a sample of a batch is ``shape.context`` tokens."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            return Decoder(shape).to(dtype)

    def batch(rank: int, rows: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(shape.vocabulary, (rows, shape.context + 1), generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload(model, batch, lambda out, y: F.cross_entropy(out.flatten(0, 1).float(), y.flatten()))


def _rows(rank: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, 64, generator=generator), torch.randn(size, 64, generator=generator)


WORKLOADS = {"gpt": decoder(GPT), "small": Workload(Small, _rows, lambda out, y: (out.float() - y).square().mean())}
