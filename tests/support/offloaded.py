"""Trees and training that are offloaded into directories, and disks that fill up."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

tree_map: Any = optree.tree_map  # its type knows no trees of other libraries

SAMPLES = torch.randn(4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ADAMW = fs.optimizer(torch.optim.AdamW, lr=1e-2)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure, and tensors of the same bytes; NaN or not."""

    def described(x: Any) -> Any:
        return (x.dtype, x.shape, raw(x)) if isinstance(x, Tensor) else x

    same = tree_map(lambda x, y: described(x) == described(y), a, b)
    return optree.tree_structure(a) == optree.tree_structure(b) and all(leaves_of(same))


def raw(x: Tensor) -> bytes:
    return (
        bytes(torch.empty(x.shape, dtype=x.dtype).copy_(x).reshape(-1).view(torch.uint8).tolist()) if x.numel() else b""
    )


def leaves_of(*trees: Any) -> list[Any]:
    return optree.tree_leaves(list(trees))  # pyright: ignore[reportArgumentType]


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """A disk on which no file grows beyond ``nbytes``: the kernel refuses the rest, as it does when a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def model_of(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)]
    return nn.Sequential(*blocks).to(dtype)


def gradient_of(params: fs.Sharded, x: Tensor = SAMPLES[0]) -> fs.Sharded:
    def loss(params: fs.Sharded) -> Tensor:
        return functional_call(model_of(), fs.gather(params), (x,)).square().mean()

    return fs.grad(loss)(params)


def example(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(7, 3, generator=generator), "b": [torch.tensor(seed), torch.zeros(0, 3)], "c": 2.5}
