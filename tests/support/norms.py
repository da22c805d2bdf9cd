"""Trees of awkward shapes and any dtype, and their norms by torch on whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import functorch_shard as fs

INF, NAN = float("inf"), float("nan")
POWERS = [1.0, 2.0, 2.5, 3.0, INF]
# Smaller than the number of ranks, a matrix row cut in two, a scalar, an empty tensor, a prime.
SHAPES: dict[str, tuple[int, ...]] = {
    "a.w": (3, 5),
    "a.b": (5,),
    "b.s": (),
    "b.no": (0, 3),
    "b.w": (7,),
    "c.w": (17, 31),
}
FROZEN = {"b.steps": torch.tensor([3, -7]), "b.mask": torch.tensor([True, False, True])}
F64, F32, BF16, C64 = torch.float64, torch.float32, torch.bfloat16, torch.complex64
Bad = dict[str, dict[tuple[int, ...], float]]  # a parameter, its index, and what is put there
# The dtypes of a tree, one parameter after the other, and the dtype that it is added up in.
DTYPES: dict[str, tuple[list[torch.dtype], torch.dtype]] = {
    "float64": ([F64], F64),
    "float32": ([F32], F32),
    "bfloat16": ([BF16], F32),
    "complex": ([C64], F32),
    "complex128": ([torch.complex128], F64),
    "mixed": ([F32, BF16, torch.float16, C64, F32], F32),
    "mixed with float64": ([F32, F64, BF16, torch.complex128], F64),
}
# Which modules every rank holds whole: none, one that has padding when sharded, and all.
IGNORED: dict[str, list[str]] = {"sharded": [], "b whole": ["b"], "all whole": ["a", "b", "c"]}
TOLERANCE = {F64: {"rtol": 1e-13, "atol": 0.0}, F32: {"rtol": 2e-6, "atol": 0.0}}


def tolerance(dtypes: str) -> dict[str, float]:
    """Sums of float32 are rounded to it, whatever they are added up with."""
    return TOLERANCE[F64 if all(dtype.itemsize >= 8 and dtype != C64 for dtype in DTYPES[dtypes][0]) else F32]


def values(dtypes: str = "float64", seed: int = 0) -> dict[str, Tensor]:
    generator, kinds = torch.Generator().manual_seed(seed), DTYPES[dtypes][0]

    def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.complex128)
        return x.to(dtype) if dtype.is_complex else x.real.to(dtype)

    return {name: draw(shape, dtype) for (name, shape), dtype in zip(SHAPES.items(), cycle(kinds), strict=False)}


def sharded(
    mesh: fs.Mesh, dtypes: str = "float64", ignored: str = "sharded", bad: Bad | None = None, **options: Any
) -> fs.Sharded:
    """With integers as well, so that they can be seen to count nothing, and what is not finite."""
    given = spoiled_values(bad or {}, dtypes)
    return fs.shard(given, fs.plan(given, mesh, ignored=IGNORED[ignored], units="blocks", **options))


def with_padding(tree: fs.Sharded, padding: float) -> fs.Sharded:
    """The same tree, its padding overwritten, on stacked or on real ranks."""
    mesh, shards = tree.layout.mesh, {}
    for key, buffer in tree.layout.buffers.items():
        sizes = buffer.split_sizes
        number = torch.cat([torch.full((n,), float(i % 2 == 0)) for i, n in enumerate(sizes)])
        rows = number.view(buffer.num_shards, -1)
        axis = list(mesh.axes).index("shard") if buffer.num_shards > 1 else None
        if mesh.is_simulated:
            shape = [size if i == axis else 1 for i, size in enumerate(mesh.axes.values())]
            mask = rows.view(*shape, -1).expand_as(tree[key])
        else:
            mask = rows[int(fs.collectives.axis_index(mesh["shard"])) if axis is not None else 0]
        shards[key] = torch.where(mask.bool(), padding, tree[key]) if buffer.differentiable else tree[key]
    return fs.Sharded(shards, tree.layout)


def total(tensors: Mapping[str, Tensor], p: float, dtype: torch.dtype) -> Tensor:
    """By torch, on the whole tensors; of empty ones it refuses to take the largest magnitude."""
    given = [x for x in tensors.values() if x.numel() or p != INF]
    return get_total_norm([x.abs().to(dtype) for x in given], p)


def first(x: Tensor, mesh: fs.Mesh) -> Tensor:
    """The value of all ranks, which have to have the same."""
    rows = x.flatten(0, len(mesh.axes) - 1)
    assert len(rows) == mesh.size
    assert all(torch.equal(row, rows[0]) or (row.isnan() and rows[0].isnan()) for row in rows)
    return rows[0]


def clipped_by_torch(tensors: Mapping[str, Tensor], max_norm: float, norm: Tensor) -> dict[str, Tensor]:
    params = {name: nn.Parameter(torch.zeros_like(x)) for name, x in tensors.items()}
    for name, param in params.items():
        param.grad = tensors[name].clone()
    clip_grads_with_norm_(params.values(), max_norm, norm)
    return {name: param.grad for name, param in params.items() if param.grad is not None}


def spoiled_values(bad: Bad, dtypes: str = "float64") -> dict[str, Tensor]:
    """With integers, and what is not finite."""
    given = values(dtypes)
    for name, places in bad.items():
        for index, value in places.items():
            given[name][index] = value
    return {**given, **FROZEN}
