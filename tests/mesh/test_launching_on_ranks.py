"""Which job a process belongs to, and its process group: fresh at each restart, refused where it would train alone."""

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

import functorch_shard as fs
from functorch_shard.mesh.launching import fresh_prefix
from tests.support.launching import OURS, environ
from tests.support.refusals import refused

LAUNCHED = [
    {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"},
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
    {"SLURM_PROCID": "3"},  # its size was lost on the way into a container
    {"WORLD_SIZE": "2"},  # of a child of Fabric before fabric.launch()
    {"RANK": "1"},
]
ONE_PROCESS = [
    {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a script of sbatch
    {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # a shell of salloc
    {"PMI_RANK": "", "PMI_SIZE": "many"},
]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, names: dict[str, str]) -> dict[str, str]:
    """A process that nobody launched, wherever the tests run, but for ``names``."""
    for name in filter(OURS.match, [*os.environ]):
        monkeypatch.delenv(name)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    return names


@pytest.mark.parametrize("names", LAUNCHED, ids=str)
def test_a_process_that_would_train_alone_is_refused(environment: dict[str, str]) -> None:
    text = refused(fs.init_mesh)
    assert text.startswith("ValueError: init_mesh: ")
    assert ": this process is one of several, and RANK and WORLD_SIZE are not both set" in text
    assert fs.init_mesh({"replicate": 1, "shard": 1}).size == fs.init_mesh(1).size == 1


@pytest.mark.parametrize("names", ONE_PROCESS, ids=str)
def test_one_process_is_one_rank(environment: dict[str, str]) -> None:
    assert fs.init_mesh().axes == {"shard": 1}
    assert "timeout: only of a process group that is made here" in refused(fs.init_mesh, timeout=3)


def started(ranks: Sequence[int], size: int, seconds: float, server: dist.TCPStore) -> list[Any]:
    """The prefix that each rank gets, or the error it raises."""
    timeout = timedelta(seconds=seconds)

    def one(rank: int) -> Any:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)
        try:
            return fresh_prefix(store, rank, size, timeout)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_each_life_of_a_job_has_a_prefix_of_its_own() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.PrefixStore("functorch_shard/start", server).set("hello/1", "a process that was killed while it waited")
    lives = [started(range(3), 3, 60, server) for _ in range(3)]
    assert [len(set(life)) for life in lives] == [1, 1, 1]
    assert len({life[0] for life in lives}) == 3
    assert re.fullmatch("[0-9a-f]{32}", lives[0][0])
    assert started([0, 2], 4, 1, server)[0] == "ranks 1, 3 of 4 did not respond within 1 s: the job needs all of them"
    assert started([1], 2, 0.5, server)[0].startswith("rank 0 did not start or ended, while rank 1 waited for it: ")


RESTARTS = 4  # torch's own start gets through that many about once in a hundred times
AGAIN = f"""
import os, torch, functorch_shard as fs
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


@pytest.mark.slow
def test_torchrun_restarts_a_job_again_and_again(tmp_path: Path) -> None:
    (script := tmp_path / "again.py").write_text(AGAIN)
    options = (
        f"--standalone --local-addr 127.0.0.1 --nproc-per-node 2 --monitor-interval 0.05 --max-restarts {RESTARTS}"
    )
    command = [sys.executable, "-m", "torch.distributed.run", *options.split(), str(script)]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"life {RESTARTS}: 2 ranks"]
