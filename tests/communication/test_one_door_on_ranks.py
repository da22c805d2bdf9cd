"""The same on real ranks; and whether a collective is waited for at once or later, its numbers are the same."""

from __future__ import annotations

import random
from collections import Counter as Multiset
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication.axis import Axis
from functorch_shard.gloo.backend import SMALL_SUM
from tests.support.one_door import AXES, check_records, every_kind, in_threads, noting, records_of
from tests.support.pool import run_ranks


def records_on_this_rank(axes: dict[str, int]) -> tuple[Any, ...]:
    mesh, seen = fs.init_mesh(axes), list[Any]()
    records = records_of(mesh)
    in_threads(lambda: every_kind(mesh.with_backend(noting(seen))))
    return *records, seen


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_collective_is_seen_once_on_real_ranks_and_in_another_thread(axes: dict[str, int]) -> None:
    results = run_ranks(records_on_this_rank, fs.simulated_mesh(axes).size, axes)
    for *records, in_a_thread in results:
        check_records(*records)
        assert Multiset(in_a_thread) == Multiset(records[0])
    assert {"exchange", "scatter"} <= {kind for recorded, *_ in results for kind, *_ in recorded}


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64]
WIDTHS = [1, 1025, SMALL_SUM]  # of 12 rows: in an envelope, through shared memory, and in two rounds
KINDS = ["all_gather", "psum_scatter", "psum", "pmax", "all_to_all"]


def sampled(draw: random.Random, axis: Axis, rank: int) -> tuple[str, Tensor]:
    """A kind and an operand, the same kind and shape on every rank."""
    kind, dtype, width, seed = draw.choice(KINDS), draw.choice(DTYPES), draw.choice(WIDTHS), draw.randrange(1000)
    dtype = torch.float32 if kind == "pmax" and dtype.is_complex else dtype
    values = 100 * torch.randn(12, width, generator=torch.Generator().manual_seed(seed + rank))
    return kind, values[: axis.size if kind == "all_to_all" else 12].to(dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def different_on_this_rank() -> list[str]:
    axis, draw, wrong = fs.init_mesh()["shard"], random.Random(0), list[str]()
    for _ in range(12):
        operands = [sampled(draw, axis, int(axis.backend.index())) for _ in range(4)]
        at_once = [axis.issue(kind, x).wait() for kind, x in operands]
        works = [axis.issue(kind, x) for kind, x in operands]
        for i in draw.sample(range(4), 4):
            kind, x = operands[i]
            wrong += [] if same_bytes(works[i].wait(), at_once[i]) else [f"{kind} of {x.shape} {x.dtype}"]
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_under_way_together_is_bitwise_what_is_waited_for_at_once(num_ranks: int) -> None:
    assert run_ranks(different_on_this_rank, num_ranks) == [[]] * num_ranks
