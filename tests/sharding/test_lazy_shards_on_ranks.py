"""The laws of shards that lie oddly, or are written to, on real ranks: the same values, and the same errors on all."""

from __future__ import annotations

import random

import pytest
import torch

import functorch_shard as fs
from tests.support.odd_shards import BATCHES, FORMS, WRITES, check_batches, check_forms, check_writes
from tests.support.pool import run_ranks


def odd_shards_on_this_rank(axes: dict[str, int]) -> list[list[str]]:
    mesh, draw = fs.init_mesh(axes), random.Random(5)  # the same cases on all ranks
    for _ in range(12):
        forms, dtype = draw.choices(sorted(FORMS), k=3), draw.choice([None, torch.bfloat16])
        check_forms(mesh, forms, draw.choice([torch.float64, torch.bfloat16, torch.complex64, torch.int32]), dtype)
        check_batches(mesh, draw.choices(sorted(BATCHES), k=3), dtype)
    return [
        check_writes(
            mesh,
            draw.choice(sorted(FORMS)),
            draw.choice([True, False]),
            draw.choice([None, torch.bfloat16]),
            [(draw.randrange(4), draw.choice([None, None, *sorted(WRITES)])) for _ in range(10)],
        )
        for _ in range(20)
    ]


@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_odd_shards_and_writes_in_between_are_right_or_refused_alike_on_every_rank(axes: dict[str, int]) -> None:
    first, *others = run_ranks(odd_shards_on_this_rank, fs.simulated_mesh(axes).size, axes)
    assert any(first)
    assert not all(first)
    assert all(told == first for told in others)
