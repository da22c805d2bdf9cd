"""Ranks that end with collectives under way end soon, with their own exit code. Note [Exit] in at_exit.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from tests.support.launching import end, environ, start
from tests.support.scripts import free_port

BEGUN = """
import os, sys, time
import torch
import functorch_shard as fs

mesh = fs.init_mesh(timeout=20)
work = mesh["shard"].issue("all_gather", torch.ones(20_000))  # by sockets
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
    late = NOT_BEGUN + 'import torch\ntime.sleep(1)\nmesh["shard"].issue("all_gather", torch.ones(20_000)).wait()'
    assert exit_codes([BEGUN + "del work", late], 2) == [0, 0]


FORKED = """
import os, sys, time
import torch.distributed as dist
from functorch_shard.communication import at_exit

class Work:
    def wait(self):
        pass

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
at_exit.leave(dist.group.WORLD, [Work()], os.getpid())
dist.destroy_process_group()
if not (child := os.fork()):
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_runs_although_its_parent_destroyed_the_process_group_of_collectives_it_let_go() -> None:
    assert exit_codes([FORKED], 1) == [0]
