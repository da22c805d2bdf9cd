"""Who launched this process: several ranks are one job, or refused with what to do; one process stays one rank."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import pytest

import functorch_shard as fs
from functorch_shard.mesh.launchers import Job, job_of
from tests.support.refusals import refused

SRUN = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
SRUN |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MVAPICH = {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}
LAUNCHED = {"srun": SRUN, "Open MPI": OPEN_MPI, "MVAPICH": MVAPICH, "MPICH and Intel MPI": HYDRA}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
KNOWN = [*SRUN, *OPEN_MPI, *MVAPICH, *HYDRA, *ADDRESS, "RANK", "WORLD_SIZE", "LOCAL_RANK"]

# One process, whatever its surroundings say of others. In a shell of salloc that is an interactive step, SLURM keeps
# the tasks of the allocation and runs one.
ONE_PROCESS: dict[str, dict[str, str]] = {
    "plain python": {},
    "torchrun's names for one": {"WORLD_SIZE": "1"},
    "sbatch without --ntasks": {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "srun --pty bash": {**SRUN, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "salloc with an interactive step": {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
}
# Room for four, and one process.
ALLOCATED = {
    "sbatch --ntasks 4": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "salloc --ntasks 4": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that nobody launched, wherever the tests run."""
    for name in KNOWN:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def put(environment: pytest.MonkeyPatch, names: Mapping[str, str]) -> None:
    for name, value in names.items():
        environment.setenv(name, value)


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_a_launched_process_that_knows_no_rank_0_is_refused_with_the_torchrun_line(
    launcher: str, environment: pytest.MonkeyPatch
) -> None:
    put(environment, LAUNCHED[launcher])
    text = refused(fs.init_mesh)
    assert text.startswith("ValueError: init_mesh: the environment: 1 problem\n  this is process 3 of 4 that ")
    assert "MASTER_ADDR and MASTER_PORT are not set: 4 jobs of one rank each" in text
    assert "\n  torchrun --nnodes <hosts> --node-rank <number> --nproc-per-node <ranks of a host> " in text
    assert "\n  export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500\n" in text
    put(environment, {"MASTER_ADDR": "127.0.0.1"})
    assert "but MASTER_PORT is not set" in refused(fs.init_mesh)


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_its_numbers_count_where_it_is_said_how_to_find_rank_0(launcher: str) -> None:
    job = Job(rank=3, size=4, local_rank=1)
    assert job_of({**LAUNCHED[launcher], **ADDRESS}) == job
    assert job_of({**LAUNCHED[launcher], **ADDRESS, "WORLD_SIZE": "4"}) == job
    text = refused(job_of, {**LAUNCHED[launcher], **ADDRESS, "WORLD_SIZE": "2"})
    assert "WORLD_SIZE=2, but " in text
    assert " started 4 processes (" in text


@pytest.mark.parametrize("lost", [["SLURM_STEP_NUM_TASKS"], ["SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"]], ids=str)
def test_a_step_whose_size_was_lost_on_the_way_is_as_large_as_its_job(lost: list[str]) -> None:
    left = {name: value for name, value in SRUN.items() if name not in lost}
    assert "this is process 3 of 4 that srun started (SLURM_PROCID=3, SLURM_NTASKS=4)" in refused(job_of, left)
    assert job_of({**left, **ADDRESS}) == Job(3, 4, 1)


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_torchrun_inside_of_another_launcher_comes_first(launcher: str) -> None:
    assert job_of({**LAUNCHED[launcher], "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == Job(5, 8)


def test_mpirun_inside_of_an_allocation_comes_before_the_srun_that_started_its_daemons() -> None:
    daemon = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    for launcher in ("Open MPI", "MVAPICH", "MPICH and Intel MPI"):
        assert job_of({**daemon, **LAUNCHED[launcher], **ADDRESS}) == Job(3, 4, 1)


@pytest.mark.parametrize("case", ONE_PROCESS)
def test_one_process_is_one_rank(case: str, environment: pytest.MonkeyPatch) -> None:
    put(environment, ONE_PROCESS[case])
    assert fs.init_mesh().axes == {"shard": 1}


@pytest.mark.parametrize("case", ALLOCATED)
def test_one_process_with_room_for_more_is_one_rank_and_says_so(case: str, environment: pytest.MonkeyPatch) -> None:
    put(environment, ALLOCATED[case])
    with pytest.warns(UserWarning, match="one rank, although SLURM allocated 4 tasks") as said:
        assert fs.init_mesh().axes == {"shard": 1}
    assert said[0].filename == __file__


@pytest.mark.parametrize("names", [*LAUNCHED.values(), *ALLOCATED.values(), {"WORLD_SIZE": "2"}], ids=str)
@pytest.mark.parametrize("axes", [1, {"shard": 1}, {"replicate": 1, "shard": 1}], ids=str)
def test_one_rank_that_is_asked_for_is_given(axes: int, names: dict[str, str], environment: pytest.MonkeyPatch) -> None:
    put(environment, names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fs.init_mesh(axes).size == 1


def test_half_of_what_torchrun_sets_is_refused(environment: pytest.MonkeyPatch) -> None:
    fabric = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0", **ADDRESS}  # of a child of fabric.launch()
    put(environment, fabric)
    text = refused(fs.init_mesh)
    assert "WORLD_SIZE=2 is set, but RANK is not" in text
    assert "torchrun --nproc-per-node <ranks> program.py" in text
    assert "call fabric.launch() first" in text
    assert "RANK=0 is set, but WORLD_SIZE is not" in refused(job_of, {"RANK": "0"})
    assert "RANK=x is set, but WORLD_SIZE is not" in refused(job_of, {"RANK": "x"})


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("address", [{}, ADDRESS], ids=["", "with an address"])
def test_one_rank_of_a_job_of_several_is_refused_with_what_each_who_asks_for_it_is_to_do(
    rank: str, address: dict[str, str], environment: pytest.MonkeyPatch
) -> None:
    put(environment, {"RANK": rank, "WORLD_SIZE": "2", **address})
    text = refused(fs.init_mesh, 1)
    assert text == refused(fs.init_mesh, {"replicate": 1, "shard": 1})
    assert f"RANK={rank}, WORLD_SIZE=2: this process is one of 2 ranks, but one rank was asked for" in text
    assert "all ranks of the job: init_mesh(). If a rank started it" in text
    assert "\n  env -u RANK -u WORLD_SIZE python program.py" in text


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("", ""), ("x", "2"), ("-1", "2"), ("0", "0")])
def test_numbers_of_no_rank_are_refused(rank: str, size: str) -> None:
    text = refused(job_of, {"RANK": rank, "WORLD_SIZE": size, **ADDRESS})
    assert f"RANK={rank}, WORLD_SIZE={size}: expected two numbers, the first below the second" in text


def test_numbers_that_are_none_are_not_taken_for_a_launcher() -> None:
    assert job_of({"PMI_RANK": "", "PMI_SIZE": "4"}) is None
    assert job_of({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "many"}) is None
