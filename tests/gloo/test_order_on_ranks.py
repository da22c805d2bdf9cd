"""Ranks of other libraries that issue different collectives, under ``check_order``: an error on every rank, no hang."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import functorch_shard as fs
from functorch_shard.collectives import psum
from functorch_shard.communication import Backend, Counter
from functorch_shard.communication.backend import Axis
from functorch_shard.communication.process_group import GroupBackend
from functorch_shard.gloo import check_order
from tests.support.differing import DIFFERENT, ONES, error_of, short_mesh
from tests.support.pool import run_ranks
from tests.support.refusals import refused


def as_any_group(axis: Axis) -> Backend:
    """The backend of NCCL and of whatever else torch has, on gloo."""
    backend: Any = axis.backend
    return GroupBackend(backend.group, backend.rank, axis.size)


def differ_on_this_rank() -> dict[str, tuple[str, str]]:
    odd, reported = dist.get_rank() == dist.get_world_size() - 1, {}
    for name, case in DIFFERENT.items():
        mesh = short_mesh(60).with_backend(as_any_group).with_backend(check_order)
        reported[name] = error_of(case[1] if odd else case[0], mesh)
    plain = fs.init_mesh().with_backend(as_any_group)
    assert psum(ONES, plain).tolist() == [plain.size] * 4  # nothing was sent, so the group itself is in step
    return reported


def test_every_rank_reports_the_first_collective_that_differs_before_it_is_issued() -> None:
    first, *others = run_ranks(differ_on_this_rank, 3)
    assert others == [first] * 2
    for name, (_, _, usual, odd) in DIFFERENT.items():
        kind, text = first[name]
        assert kind == "RuntimeError"
        title, *lines = text.splitlines()
        assert title.endswith(f" issue different collectives, each as its number {usual.partition(': ')[0]}:")
        for rank, expected in enumerate((usual, usual, odd)):
            assert re.fullmatch(f"  rank {rank}: {expected.partition(': ')[2]}", lines[rank])


def stalled_on_this_rank() -> tuple[str, str]:
    mesh = short_mesh(2).with_backend(as_any_group).with_backend(check_order)
    psum(ONES, mesh)
    if mesh.rank == 1:
        time.sleep(6)
        return "", ""
    return error_of(lambda mesh: psum(ONES, mesh), mesh)


@pytest.mark.slow
def test_a_rank_that_stalls_is_named_on_the_others() -> None:
    (kind, text), _, last = run_ranks(stalled_on_this_rank, 3)
    assert kind == last[0] == "RuntimeError"
    for each in (text, last[1]):
        assert "psum of 4 float32 on axis 'shard' failed: rank 1 did not respond within 2 s" in each


def same_on_this_rank() -> None:
    counter, plain = Counter(), fs.init_mesh()
    assert check_order(plain["shard"]) is plain["shard"]  # gloo compares every collective anyway
    mesh = plain.with_backend(as_any_group).with_backend(check_order).with_backend(counter)
    x = torch.randn(6, generator=torch.Generator().manual_seed(mesh.rank))
    assert torch.equal(psum(x, mesh), psum(x, plain))
    assert counter["shard", "psum"].number == 1


def test_what_is_the_same_on_all_ranks_is_issued_as_ever() -> None:
    run_ranks(same_on_this_rank, 2)


def test_it_needs_a_process_group_or_ranks_that_cannot_differ() -> None:
    class Own(Backend):
        def index(self) -> int:
            return 0

        def issue(self, op: Any, x: Any, /) -> Any: ...

    for mesh in (fs.simulated_mesh(3), fs.init_mesh()):
        assert mesh.with_backend(check_order)["shard"] is mesh["shard"]
    text = refused(fs.simulated_mesh(2).with_backend(lambda axis: Own()).with_backend, check_order)
    assert "check_order: axis 'shard': got a Own, expected a process group" in text
