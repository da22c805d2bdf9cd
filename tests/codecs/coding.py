"""Codecs, and tensors of every dtype to encode."""

from __future__ import annotations

import torch
from torch import Tensor

import functorch_shard as fs

CODECS = {
    "int8": fs.codecs.int8(),
    "int8 in blocks of 3": fs.codecs.int8(3),
    "float8": fs.codecs.float8(),
    "float8_e5m2": fs.codecs.float8(7, torch.float8_e5m2),
}
AXES: list[dict[str, int]] = [
    {"shard": 1},
    {"shard": 3},
    {"shard": 3, "replicate": 2},
    {"replicate": 3},
]


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "a.w": draw(17, 31),
        "a.n": torch.tensor([3, 2**20 + 1]),
        "a.z": torch.complex(draw(3), draw(3)),
        "b.w": draw(700).double(),
        "b.half": draw(5).bfloat16(),
        "c.s": draw(),
        "c.none": draw(0, 4),
    }
