"""Ranks of a job meet at its start and at every restart, without anything of an earlier life; who is late is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import functorch_shard as fs
from functorch_shard.mesh.rendezvous import meet
from tests.support.launching import environ, printed
from tests.support.refusals import refused
from tests.support.scripts import free_port, start

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


@pytest.mark.slow
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


DESTROYED = """
from pathlib import Path
import torch
import functorch_shard as fs

fs.init_mesh()
torch.optim.Adam([torch.ones(1)])  # imports what may keep the default group
torch.distributed.destroy_process_group()
threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
print(sum("gloo" in name for name in threads), "threads of gloo")
"""


@pytest.mark.slow
def test_a_process_group_that_was_destroyed_has_no_threads_left() -> None:
    """A process that exits with such threads may end by SIGABRT, although it did all that it was to do."""
    job = environ(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert printed([sys.executable, "-c", DESTROYED], envs=[job]) == "0 threads of gloo\n"


STARTS_ANOTHER = """
import subprocess
import sys
import torch
import functorch_shard as fs

mesh = fs.init_mesh(1)
print(mesh, torch.distributed.get_world_size(), flush=True)
if "child" not in sys.argv:
    subprocess.run([sys.executable, __file__, "child"], check=True)
"""


def test_a_process_that_the_only_rank_of_a_job_started_is_a_rank_too(tmp_path: Path) -> None:
    (script := tmp_path / "starts_another.py").write_text(STARTS_ANOTHER)
    job = environ(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert printed([sys.executable, str(script)], envs=[job]) == 2 * "Mesh(shard=1, cpu) 1\n"


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


@pytest.mark.slow  # torch's store may take seconds to accept a client where other processes take all cores
def test_every_rank_that_came_names_those_that_did_not(server: dist.TCPStore) -> None:
    server.set("hello/2", "a process of an earlier life")
    said = meet_all(server, [0, 1, 3], 5, seconds=12)
    assert said == ["ranks 2, 4 of 5 did not respond within 12 s: the job needs all of them to start"] * 3


@pytest.mark.slow
def test_a_rank_that_dies_and_comes_again_is_met_while_others_are_awaited(server: dist.TCPStore) -> None:
    """Its first life has signed under the prefix of this one already, and is no longer there."""
    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(meet_all, server, [rank], 3) for rank in (0, 1)]
        while not server.check(["hello/1"]):
            time.sleep(0.01)
        dead = server.get("hello/1")
        while not server.check([f"answer/{dead.decode()}"]):
            time.sleep(0.01)
        again = pool.submit(meet_all, server, [1], 3)
        while server.get("hello/1") == dead:
            time.sleep(0.01)
        late = pool.submit(meet_all, server, [2], 3)
        prefixes = {run.result()[0] for run in (first[0], again, late)}
        assert len(prefixes) == 1
        assert re.fullmatch("[0-9a-f]{32}", prefixes.pop())


START = """
import functorch_shard as fs
try:
    fs.init_mesh(timeout=10)
except RuntimeError as error:
    print(error)
"""


def started(rank: int, size: int, port: int) -> subprocess.Popen[str]:
    """One rank without torchrun, as SLURM or mpirun would start it."""
    job = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **job, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen([sys.executable, "-c", START], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_without_torchrun_too_every_rank_names_those_that_did_not_come() -> None:
    port = free_port()
    ranks = [started(rank, 4, port) for rank in (0, 1, 3)]
    try:
        said = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert said == ["rank 2 of 4 did not respond within 10 s: the job needs all of them to start\n"] * 3


NUMBERED_BY = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH and Intel MPI": ("PMI_RANK", "PMI_SIZE"),
}
ADD_UP = """
import torch
import functorch_shard as fs
mesh = fs.init_mesh()
print(mesh.rank, mesh.size, fs.collectives.psum(torch.tensor(10 ** mesh.rank), mesh).item())
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", NUMBERED_BY)
def test_processes_of_srun_and_mpirun_are_the_ranks_of_one_job(launcher: str, tmp_path: Path) -> None:
    port, (rank, size) = free_port(), NUMBERED_BY[launcher]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), size: "3", "GLOO_SOCKET_IFNAME": "lo"}
    files = [tmp_path / str(i) for i in range(3)]
    ranks = [start(ADD_UP, environ={**environment, rank: file.name}, output=file) for file in files]
    try:
        for process in ranks:
            process.join(120)
    finally:
        for process in ranks:
            process.kill()
    assert [file.read_text() for file in files] == ["0 3 111\n", "1 3 111\n", "2 3 111\n"]


def test_what_the_environment_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "MASTER_ADDR: not set" in refused(fs.init_mesh)


def test_ranks_whose_rank_0_does_not_come_say_so(server: dist.TCPStore) -> None:
    for said in meet_all(server, [1, 2], 3, seconds=0.5):
        assert said.startswith("rank 0 did not start, or ended, or began without this rank, which came again, ")
