"""A transformer under tensor and sequence parallelism, and the same one without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

WIDTH, HEAD, BETWEEN, WORDS, BLOCKS = 8, 2, 7, 11, 3  # neither what lies between nor the words divide by two


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-2, -1)).softmax(-1)  # of the heads that are here
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, BETWEEN), nn.Linear(BETWEEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Besides what is distributed: a plain scalar that every rank computes with alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.scale * self.head(self.norm(x))


def tie(model: Transformer) -> Transformer:
    """One weight in two units, and a frozen one; after it was distributed, as that makes new parameters."""
    blocks: Any = model.blocks
    blocks[1].attention.q.weight = blocks[0].attention.q.weight
    blocks[2].mlp.down.bias.requires_grad_(False)
    return model


def transformer(dtype: torch.dtype = torch.float64) -> Transformer:
    torch.manual_seed(0)
    model = Transformer().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def parallelize(model: Transformer, tensor_mesh: DeviceMesh) -> Transformer:
    """Between blocks every rank has a part of the sequence, inside a part of the heads and of the features."""
    styles: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(BLOCKS):
        block = f"blocks.{i}"
        styles |= {f"{block}.{name}": SequenceParallel() for name in ("norm1", "norm2")}
        styles |= {f"{block}.attention.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in "qkv"}
        styles |= {
            f"{block}.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")
        }
        styles[f"{block}.mlp.up"] = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    return parallelize_module(model, tensor_mesh, styles)  # pyright: ignore[reportReturnType]


def whole(x: Any) -> Tensor:
    """A parameter, or what was computed of one, on every rank."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def sentences(step: int, rank: int) -> Tensor:
    """Of rank ``rank`` of the data axis: words that follow each other, from one that is drawn."""
    first = torch.randint(WORDS, (3, 1), generator=torch.Generator().manual_seed(100 * step + rank))
    return (first + torch.arange(5)) % WORDS


def next_words(logits: Tensor, words: Tensor) -> Tensor:
    """The mean loss of all words but the first."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
