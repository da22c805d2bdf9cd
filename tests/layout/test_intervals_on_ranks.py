"""The intervals of a layout are those of torch's own FSDP1, rank by rank, packed and aligned."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import functorch_shard as fs

# (name, offset in the shard, numel, start, inclusive end) of each piece, and the number of elements of a shard.
Intervals = tuple[list[tuple[str, int, int, int, int]], int]


class Bag(nn.Module):
    """Parameters of any shapes; what they compute does not matter."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(shape)))


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(17, 5), "norm": nn.LayerNorm(5), "head": nn.Linear(5, 17)})
    model["head"].weight = model["embed"].weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fewer elements than ranks": lambda: Bag((1,), (1,)),
    "rows cut in two": lambda: Bag((17, 257), (3, 3), (1,), (5, 1, 7)),
    "a parameter over all ranks": lambda: Bag((3,), (1000,), (2,)),
    "ends at a boundary": lambda: Bag((8,), (8,), (8,)),
    "nested": lambda: nn.Sequential(nn.Linear(7, 15), nn.Sequential(nn.LayerNorm(15), nn.Linear(15, 3, bias=False))),
    "tied": tied,
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
CASES = [(model, dtype, align) for model in MODELS for dtype in DTYPES for align in (0, 16)]


def intervals_of_fsdp(model: nn.Module, aligned: bool) -> Intervals:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=aligned)
    handle = wrapped._handle
    assert handle is not None
    flat = handle.flat_param
    pieces = [
        (name, info.offset_in_shard, info.numel_in_shard, info.intra_param_start_idx, info.intra_param_end_idx)
        for name, info in zip(flat._fqns, flat._shard_param_infos, strict=True)
        if info.in_shard
    ]
    return pieces, flat._sharded_size.numel()  # pyright: ignore[reportReturnType]


def intervals_of_layout(model: nn.Module, mesh: fs.Mesh, align_bytes: int) -> Intervals:
    layout = fs.plan(model, mesh, align_bytes=align_bytes, units=10**9)
    (buffer,) = layout.buffers.values()
    pieces = layout.slices(mesh.rank)
    return [(p.name, p.offset, p.numel, p.start, p.start + p.numel - 1) for p in pieces], buffer.shard_numel


def both_intervals() -> list[tuple[Intervals, Intervals]]:
    """On each rank: what the layout says and what FSDP1 says, for all cases."""
    mesh = fs.init_mesh()
    return [
        (
            intervals_of_layout(MODELS[model]().to(dtype), mesh, align_bytes),
            intervals_of_fsdp(MODELS[model]().to(dtype), align_bytes > 0),
        )
        for model, dtype, align_bytes in CASES
    ]


def test_every_rank_holds_the_intervals_of_flat_param_handle() -> None:
    results = fs.testing.run_ranks(both_intervals, 3)
    for rank, answers in enumerate(results):
        for case, (mine, theirs) in zip(CASES, answers, strict=True):
            assert mine == theirs, f"rank {rank}, {case}"
