"""The same on real ranks; and whether a collective is waited for at once or later, its numbers are the same."""

from __future__ import annotations

from collections import Counter as Multiset
from typing import Any

import pytest

import functorch_shard as fs
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
