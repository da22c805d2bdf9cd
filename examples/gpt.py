"""A byte-level GPT, and text to train it on: plain torch, which does not know of ranks and shards."""

import math
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

CONTEXT, WIDTH, HEADS, DEPTH, VOCABULARY = 64, 128, 4, 4, 256


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1))  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).flatten(2)))  # (B, T, C)
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.before = nn.Embedding(VOCABULARY, WIDTH)  # a byte has little information: the two before it help early on
        self.before_that = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for table in (self.embed, self.before, self.before_that):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.embed.weight  # tied: sharded once, both uses add to its gradient

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        earlier = F.pad(tokens, (2, 0))  # (B, T + 2)
        x = self.embed(tokens) + self.before(earlier[:, 1:-1]) + self.before_that(earlier[:, :-2])
        x = x + self.position[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


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


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (len(starts), CONTEXT)."""
    tokens = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


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
