"""Collectives that nobody waits for: ranks go on, and end soon, with their own exit code. Note [Exit]."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

import functorch_shard as fs
from functorch_shard.collectives import psum
from functorch_shard.gloo.backend import SMALL_MESSAGE, GlooBackend
from functorch_shard.testing import run_ranks
from tests.support.launching import end, environ, start
from tests.support.scripts import free_port

BEGUN = """
import os, sys, time
import torch
import functorch_shard as fs
import functorch_shard.gloo.backend

mesh = fs.init_mesh(timeout=20)
functorch_shard.gloo.backend.GlooBackend._memory = None  # by sockets
work = mesh["shard"].issue("all_gather", torch.ones(20_000))
"""
NOT_BEGUN = "import time\nimport functorch_shard as fs\n\nmesh = fs.init_mesh(timeout=20)\n"
ENDS = {
    "what is under way is let go": ("del work", 0),
    "what is under way is kept": ("", 0),
    "its mesh is let go": ("del work, mesh", 0),
    "sys.exit": ("del work; sys.exit(3)", 3),
    "an exception": ("del work; raise ValueError", 1),
    "an exception that refers to it": ("raise ValueError(work)", 1),
    "the process group is destroyed": ("del work; torch.distributed.destroy_process_group()", 0),
}


def exit_codes(programs: Sequence[str], awaited: int, seconds: float = 60) -> list[int | None]:
    """Those of the first ``awaited`` of these ranks; the rest is ended."""
    job = {"WORLD_SIZE": str(len(programs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    commands = [[sys.executable, "-c", program] for program in programs]
    ranks = [start(command, environ(RANK=str(rank), **job)) for rank, command in enumerate(commands)]
    try:
        for rank in ranks[:awaited]:
            rank.communicate(timeout=seconds)
        return [rank.returncode for rank in ranks[:awaited]]
    finally:
        for rank in ranks:
            end(rank)


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_ranks_end_with_their_own_exit_code_whatever_is_under_way(case: str) -> None:
    statements, code = ENDS[case]
    assert exit_codes([BEGUN + statements] * 2, 2) == [code, code]


@pytest.mark.slow
@pytest.mark.parametrize("statements", ["del work", "", "del work, mesh"])
def test_a_rank_ends_although_another_one_never_takes_what_it_sends(statements: str) -> None:
    ends, works_on = f"{BEGUN}{statements}\nraise ValueError", f"{NOT_BEGUN}time.sleep(100)"
    assert exit_codes([ends, works_on], 1) == [1]


@pytest.mark.slow
def test_another_rank_may_take_a_while_later_what_was_sent_by_one_that_ends() -> None:
    late = NOT_BEGUN + (
        "import torch, functorch_shard.gloo.backend\nfunctorch_shard.gloo.backend.GlooBackend._memory = None\n"
        'time.sleep(1)\nmesh["shard"].issue("all_gather", torch.ones(20_000)).wait()'
    )
    assert exit_codes([BEGUN + "del work", late], 2) == [0, 0]


def collected_on_this_rank(threshold: int) -> None:
    """Collections fall into the start of collectives too, in gloo's C++."""
    mesh = fs.init_mesh()
    gc.set_threshold(threshold)
    with patch.object(GlooBackend, "_memory", None):
        for i in range(300):
            numel = SMALL_MESSAGE if i % 10 == 0 else 5  # over sockets, in the envelope
            freed_later: list[Any] = [mesh["shard"].issue("all_gather", torch.ones(numel))]
            freed_later.append(freed_later)
        assert psum(torch.tensor(1.0), mesh) == mesh.size


@pytest.mark.parametrize("threshold", [17, 37])
def test_the_garbage_collector_may_free_them_in_the_middle_of_another_collective(threshold: int) -> None:
    run_ranks(collected_on_this_rank, 2, threshold)


def freed_with_its_mesh_on_this_rank() -> None:
    """Rank 1 is behind; the process group stays, and another mesh goes on with it."""
    for numel in (5, SMALL_MESSAGE, 50 * SMALL_MESSAGE):
        for i in range(3):
            mesh = fs.init_mesh()
            if mesh.rank == 1:
                time.sleep(0.05)
            with patch.object(GlooBackend, "_memory", None):
                mesh["shard"].issue("all_gather", torch.full((numel,), float(i)))
            del mesh
            gc.collect()
            assert psum(torch.full((numel,), 1.0 + i), fs.init_mesh()).unique() == 2 + 2 * i


def test_one_that_is_freed_with_its_mesh_does_not_disturb_the_next_mesh() -> None:
    run_ranks(freed_with_its_mesh_on_this_rank, 2)
