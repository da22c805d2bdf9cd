"""Real ranks: one has the values, the others receive their shard and nothing more, and an error comes on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.testing import count_collectives
from tests.support.live_bytes import LiveBytes, settle_scatters
from tests.support.models import awkward, two_layers
from tests.support.pool import run_ranks
from tests.support.refusals import text_of

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.int64, torch.int16, torch.uint8, torch.uint16, torch.bool),
]


def of_every_dtype() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {f"m{i}.w": (9 * torch.randn(3, 5)).to(dtype) for i, dtype in enumerate(DTYPES)}


def garbage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full(x.shape, 77).to(x.dtype) for name, x in tensors.items()}


CASES: dict[str, Any] = {
    "awkward": (lambda: {name: p.detach() for name, p in awkward().named_parameters()}, {}),
    "whole": (lambda: {name: p.detach() for name, p in awkward().named_parameters()}, {"ignored": ["blocks", "mask"]}),
    "dtypes": (of_every_dtype, {"ignored": ["m1.w", "m4.w", "m6.w", "m12.w"]}),
}


def shards_on_this_rank(axes: dict[str, int]) -> dict[str, Any]:
    mesh = fs.init_mesh(axes)
    results: dict[str, Any] = {}
    for case, (make, options) in CASES.items():
        layout = fs.plan(make(), mesh, **options)
        for source in range(mesh.size):
            for others in ("none", "garbage", "anything"):
                given = {"none": None, "garbage": garbage(make()), "anything": 3}[others]
                with count_collectives() as seen:
                    params = fs.shard(make() if mesh.rank == source else given, layout, from_rank=source)
                expected = fs.shard(make(), layout)
                for key, x in expected.items():
                    assert params[key].dtype == x.dtype
                    assert torch.equal(params[key].view(torch.uint8), x.view(torch.uint8)), (case, source, others, key)
                results[f"{case} from {source}"] = dict(seen.by_kind)
    return results


@pytest.mark.parametrize(
    "axes", [{"shard": 2}, {"replicate": 2, "shard": 2}, {"shard": 2, "replicate": 2}, {"replicate": 2}], ids=str
)
def test_every_rank_gets_its_shard_of_the_values_of_one(axes: dict[str, int]) -> None:
    results = run_ranks(shards_on_this_rank, fs.simulated_mesh(axes).size, axes)
    num_buffers = len(fs.plan(CASES["awkward"][0](), fs.simulated_mesh(axes)).buffers)
    for rank, counts in enumerate(results):
        for source in range(len(results)):
            seen = dict(counts[f"awkward from {source}"])
            assert seen.pop("exchange") == len(axes)  # whether all ranks are well
            assert seen == expected_counts(axes, rank, source, num_buffers)


def expected_counts(axes: dict[str, int], rank: int, source: int, num_buffers: int) -> dict[str, int]:
    """A scatter beside the source, and a broadcast to the copies."""
    if len(axes) == 1:
        return {"scatter" if "shard" in axes else "broadcast": num_buffers}
    beside = rank // 2 == source // 2 if list(axes) == ["replicate", "shard"] else rank % 2 == source % 2
    return {**({"scatter": num_buffers} if beside else {}), "broadcast": num_buffers}


def errors_on_this_rank() -> list[str]:
    mesh, model = fs.init_mesh(), two_layers()
    layout, mine = fs.plan(model, mesh), mesh.rank == 1
    wrong = {**dict(model.named_parameters()), "0.bias": torch.zeros(3)}
    told = [
        text_of(lambda: fs.shard(wrong if mine else None, layout, from_rank=1)),
        text_of(lambda: fs.shard(None, layout, from_rank=1)),
        text_of(lambda: fs.shard(model, layout, from_rank=2)),
        text_of(lambda: fs.shard(model, layout, from_rank=mesh.rank)),
    ]
    dist.barrier()  # nobody is left behind
    return told


def test_what_is_wrong_on_the_source_is_told_on_every_rank() -> None:
    first, second = run_ranks(errors_on_this_rank, 2)
    assert second[0].startswith("ValueError: shard: 1 problem\n  '0.bias': got shape (3,)")
    assert first[0].startswith(
        "RuntimeError: shard failed on rank 1, so no rank can go on. There:\nValueError: shard: 1"
    )
    assert second[1].startswith("TypeError: source: got NoneType")
    assert "failed on rank 1" in first[1]
    assert first[2] == second[2]
    assert "got 2, expected 0 <= from_rank < 2" in first[2]
    assert first[3] == second[3]
    assert "rank 0: from_rank=0" in first[3]
    assert "rank 1: from_rank=1" in first[3]


WIDTH, UNITS, RANKS = 128, 6, 2
UNIT = 4 * WIDTH * (WIDTH + 1)


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))


def memory_on_this_rank() -> LiveBytes:
    mesh = fs.init_mesh()
    layout = fs.plan(linears(), mesh)
    model = linears() if mesh.rank == 0 else None
    settle_scatters()
    with LiveBytes() as live:
        live.mark("start")
        params = fs.shard(model, layout, from_rank=0)
        live.mark("sent")
    assert len(params) == UNITS
    return live


def test_only_the_source_holds_more_than_its_shards_and_that_is_one_unit() -> None:
    source, receiver = (live.growth("start", "sent") for live in fs.testing.run_ranks(memory_on_this_rank, RANKS))
    shards = UNITS * UNIT // RANKS
    assert shards <= receiver < shards + 3000  # what is said about errors
    assert shards <= source < shards + UNIT + 3000
