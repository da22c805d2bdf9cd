"""A byte-level GPT, and text to train it on: plain torch, which does not know of ranks and shards."""

import math
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

CONTEXT, WIDTH, HEADS, DEPTH, VOCABULARY = 64, 128, 4, 4, 256


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, of_heads: Callable[[Tensor, Tensor, Tensor], Tensor] = causal) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        return self.proj(of_heads(q, k, v).transpose(1, 2).flatten(2))  # (B, T, C)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention, self.norm, self.dropout = Attention(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, of_heads: Callable[[Tensor, Tensor, Tensor], Tensor] = causal) -> Tensor:
        x = x + self.dropout(self.attention(x, of_heads))
        return x + self.dropout(self.mlp(self.norm(x)))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int | None = None, depth: int | None = None) -> None:
        super().__init__()
        width, depth = WIDTH if width is None else width, DEPTH if depth is None else depth
        self.embed = nn.Embedding(VOCABULARY, width)
        self.before = nn.Embedding(VOCABULARY, width)  # a byte has little information: the two before it help early on
        self.before_that = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for table in (self.embed, self.before, self.before_that):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.embed.weight  # tied: sharded once, both uses add to its gradient

    def first(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        earlier = F.pad(tokens, (2, 0))  # (B, T + 2)
        x = self.embed(tokens) + self.before(earlier[:, 1:-1]) + self.before_that(earlier[:, :-2])
        return x + self.position[: tokens.shape[-1]]

    def last(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, V)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        x = self.first(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each sequence."""
    return F.cross_entropy(logits.mT, targets, reduction="none").mean(-1)


def read_text(path: str | None) -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes to validate on: of one file its end, of the standard library every 16th file."""
    if path:
        text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
        cut = len(text) - max(len(text) // 10, 2 * CONTEXT)
        return text[:cut], text[cut:]
    root = Path(sysconfig.get_paths()["stdlib"])
    other = {"site-packages", "test", "tests", "encodings"}  # tables of character codes are not text
    files = sorted(f for f in root.rglob("*.py") if not other & set(f.parts))
    parts = [[f.read_bytes() for i, f in enumerate(files) if (i % 16 == 0) == held_out] for held_out in (False, True)]
    train, valid = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, valid


def windows(text: Tensor, starts: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (len(starts), length)."""
    tokens = text[starts[:, None] + torch.arange((length or CONTEXT) + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def batches(text: Tensor, steps: int, size: int, length: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Global batches, the same on every rank."""
    last, generator = len(text) - (length or CONTEXT), torch.Generator().manual_seed(0)
    return [windows(text, torch.randint(last, (size,), generator=generator), length) for _ in range(steps)]


def schedule(step: int, num_steps: int, peak: float = 4e-3) -> float:
    """The learning rate: linear warm-up, then cosine decay to a tenth."""
    warmup = max(num_steps // 20, 1)
    progress = max(step - warmup, 0) / max(num_steps - warmup, 1)
    return peak * min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * progress))


def sample(model: GPT, full: Mapping[str, Tensor], prompt: bytes, num_bytes: int, seed: int) -> str:
    """The prompt and the bytes that the model continues it with."""
    generator = torch.Generator().manual_seed(seed)
    tokens, device = torch.tensor([list(prompt)]), full["position"].device
    with torch.no_grad():
        for _ in range(num_bytes):
            logits = functional_call(model, dict(full), (tokens[:, -CONTEXT:].to(device),))[0, -1].cpu()
            chosen = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen[None]], 1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
