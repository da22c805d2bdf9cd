"""Ranks of a job meet at its start and at every restart, without anything of an earlier life; who is late is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from functorch_shard.rendezvous import meet

ROOT = Path(__file__).parents[2]
RESTARTS = 4  # torch's own start gets through that many about once in a hundred times
AGAIN = f"""
import os
import torch
import functorch_shard as fs

life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
mesh = fs.init_mesh(timeout=30)
ranks = fs.collectives.psum(torch.ones(1), mesh).item()
if life < {RESTARTS}:
    os._exit(1 if mesh.rank == life % 2 else 0)
if mesh.rank == 0:
    print(f"life {{life}}: {{ranks:g}} ranks")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_torchrun_restarts_a_job_again_and_again(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    options = (
        f"--standalone --local-addr 127.0.0.1 --nproc-per-node 2 --monitor-interval 0.05 --max-restarts {RESTARTS}"
    )
    command = [sys.executable, "-m", "torch.distributed.run", *options.split(), str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"life {RESTARTS}: 2 ranks"]
    assert "failed to connect" not in done.stderr


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet_all(server: dist.TCPStore, ranks: Sequence[int], size: int, seconds: float = 60) -> list[Any]:
    """What each rank gets, or the error it raises."""

    def one(rank: int) -> Any:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=seconds))
        try:
            return meet(store, rank, size, timedelta(seconds=seconds))
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_life_of_a_job_has_a_prefix_that_its_ranks_share_and_no_other_has(
    server: dist.TCPStore, size: int
) -> None:
    lives = [meet_all(server, range(size), size) for _ in range(3)]
    assert [len(set(life)) for life in lives] == [1, 1, 1]
    assert len({life[0] for life in lives}) == 3


def test_a_rank_of_an_earlier_life_that_never_finished_is_not_taken_for_one_of_this(server: dist.TCPStore) -> None:
    server.set("hello/1", "a process that was killed while it waited")
    server.set("hello/2", "another")
    first, second, third = meet_all(server, range(3), 3)
    assert first == second == third
    assert re.fullmatch("[0-9a-f]{32}", first)


def test_every_rank_that_came_names_those_that_did_not(server: dist.TCPStore) -> None:
    server.set("hello/2", "a process of an earlier life")
    said = meet_all(server, [0, 1, 3], 5, seconds=1)
    assert said == ["ranks 2, 4 of 5 were not there within 1 s: the job needs all of them to start"] * 3


def test_ranks_whose_rank_0_does_not_come_say_so(server: dist.TCPStore) -> None:
    for rank, said in zip([1, 2], meet_all(server, [1, 2], 3, seconds=0.5), strict=True):
        assert said.startswith(f"rank 0 did not start, or ended, while rank {rank} waited for it: ")
