"""shard from the values of one rank: bitwise those, whatever the others hold, and an error comes on all of them."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.sharding.test_resharding import bits
from tests.support.models import awkward, two_layers
from tests.support.ranks import HYBRID, Ranks, gloo, rows_of, simulated
from tests.support.refusals import text_of

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.int64, torch.int16, torch.uint8, torch.uint16, torch.bool),
]


def of_every_dtype() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {f"m{i}.w": (9 * torch.randn(3, 5)).to(dtype) for i, dtype in enumerate(DTYPES)}


def with_odd_numbers() -> dict[str, Tensor]:
    """-0.0 and infinity, which a sum with zeros, or with what others hold, would lose."""
    odd = {"scale": torch.tensor(-0.0).double(), "inp.bias": torch.full((7,), torch.inf).double()}
    return {**{name: p.detach() for name, p in awkward().named_parameters()}, **odd}


CASES: dict[str, Any] = {
    "awkward": (with_odd_numbers, {}),
    "whole": (with_odd_numbers, {"ignored": ["blocks", "mask"]}),
    "packed": (with_odd_numbers, {"units": 1, "align_bytes": 0}),
    "dtypes": (of_every_dtype, {"ignored": ["m1.w", "m4.w", "m6.w", "m12.w"]}),
}


def each_case_from_each_rank(mesh: fs.Mesh) -> dict[int, dict[str, int]]:
    """The collectives by which the first case comes from each rank; what comes is compared here."""
    sent: dict[int, dict[str, int]] = {}
    kind = cycle(range(3))  # of what the others hold: nothing, other values, or no model
    for case, (make, options) in CASES.items():
        if case == "dtypes" and mesh.is_simulated:  # torch does not index some of them in a batch
            continue
        values = make()
        layout = fs.plan(values, mesh, **options)
        wrong = {name: torch.full(x.shape, 77).to(x.dtype) for name, x in values.items()}
        expected = fs.shard(values, layout)
        for source in range(mesh.size):
            ranks = {n: [x if r == source else wrong[n] for r in range(mesh.size)] for n, x in values.items()}
            given: Any = rows_of(mesh, {name: torch.stack(rows) for name, rows in ranks.items()})
            if not mesh.is_simulated and mesh.rank != source:
                given = (None, given, 3)[next(kind)]
            with count_collectives() as seen:
                params = mesh.spmd(partial(fs.shard, layout=layout, from_rank=source))(given)
            for key, x in expected.items():
                assert params[key].dtype == x.dtype
                assert torch.equal(bits(params[key]), bits(x)), (case, source, given, key)
            if case == "awkward":
                sent[source] = dict(seen.by_kind)
        if mesh.is_simulated:  # one process has the values of all
            assert_trees_close(fs.shard(values, layout, from_rank=0), expected, rtol=0, atol=0)
    return sent


SIMULATED = simulated(5, {"replicate": 2, "shard": 3}, {"shard": 3, "replicate": 2}, {"replicate": 3})


@pytest.mark.parametrize("ranks", [*SIMULATED, *gloo(2, HYBRID, {"replicate": 2})], ids=str)
def test_every_rank_gets_its_shard_of_the_values_of_one_bitwise(ranks: Ranks) -> None:
    axes = dict(ranks.axes)
    num_buffers = len(fs.plan(with_odd_numbers(), fs.simulated_mesh(axes)).buffers)
    for sent in ranks.run(each_case_from_each_rank):
        for source in range(ranks.size) if ranks.real else ():
            told = {"exchange": len(axes)}  # whether all ranks are well
            assert sent[source] == told | {"broadcast": num_buffers * len(axes)}


def errors(mesh: fs.Mesh) -> list[str]:
    model = two_layers()
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


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_what_is_wrong_on_the_source_is_told_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks.run(errors)
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
