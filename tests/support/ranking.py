"""What collectives return of each dtype, and what a rank is told of its own number, on every kind of mesh."""

from __future__ import annotations

from typing import Any

import torch

import functorch_shard as fs
from functorch_shard.collectives import axis_index

VERBS = ("psum", "pmean", "pmax", "all_gather", "psum_scatter")
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64)


def dtypes_of(mesh: fs.Mesh) -> dict[tuple[str, torch.dtype], torch.dtype]:
    """The dtype of each collective's result, by verb and dtype of the operand."""
    results: dict[tuple[str, torch.dtype], torch.dtype] = {}
    for verb in VERBS:
        collective: Any = getattr(fs.collectives, verb)
        for dtype in DTYPES:
            x = torch.ones(mesh.size * mesh.size, dtype=dtype)
            results[verb, dtype] = mesh.spmd(lambda x, c=collective: c(x, mesh))(mesh.split(x)).dtype
    return results


def number_of(mesh: fs.Mesh) -> Any:
    """This rank's number, as a program for all kinds of ranks asks for it."""
    return mesh.spmd(lambda: axis_index(mesh))()
