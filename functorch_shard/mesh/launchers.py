"""Which rank of which job this process is, by what its launcher left in the environment.

Note [Launchers]: torchrun, and whatever works as it does, sets ``RANK`` and ``WORLD_SIZE``. ``mpirun`` and ``srun``
number their processes under names of their own and do not say where rank 0 is. Of SLURM only a job step counts:
``SLURM_STEP_NUM_TASKS`` is how many processes one ``srun`` started. ``SLURM_NTASKS`` is how many an allocation has room
for: it is set in the script of ``sbatch`` and in the shell of ``salloc`` too, and those are one process each, with a
``SLURM_PROCID`` of 0. MPI is asked before SLURM: inside an allocation ``mpirun`` may start its daemons by ``srun``, one
on each node, and their children inherit what ``srun`` gave the daemons.

A process that a rank starts (a subprocess, a notebook) inherits the numbers of the rank, and nothing in its environment
says so. So ``init_mesh(1)`` with the numbers of a job of several ranks is either one of these processes, or a mistake
of all ranks, each of which would train alone. The two cannot be told apart, and are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import reject

_VERB = "init_mesh: the environment"
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = "torchrun --nnodes <hosts> --node-rank <number> --nproc-per-node <ranks of a host> --master-addr <host 0>"


@dataclass(frozen=True)
class Job:
    """All processes that one launcher started, and which of them this is."""

    rank: int
    size: int
    local_rank: int | None = None  # among those of this host, where the launcher says it


@dataclass(frozen=True)
class _Launcher:
    """What a launcher is called, and the names under which it numbers its processes."""

    command: str
    rank: str
    size: str
    local_rank: str

    def job(self, environ: Mapping[str, str]) -> Job | None:
        """What it says, or ``None`` where it started nothing, or one process alone."""
        rank, size, local = (_number(environ, name) for name in (self.rank, self.size, self.local_rank))
        return None if rank is None or size is None or size < 2 else Job(rank, size, local)


_LAUNCHERS = (
    _Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    _Launcher("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
_WHOLE_JOB = _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def job_of(environ: Mapping[str, str], *, alone: bool = False) -> Job | None:
    """The job that ``environ`` speaks of, or ``None``: one process that was not launched as one of several.

    Args:
        environ: ``os.environ``.
        alone: one rank was asked for, whatever launched the process; only ``RANK`` and ``WORLD_SIZE`` are looked at.

    Raises:
        ValueError: a launcher started several processes and does not say how they find each other. Each would be a job
            of its own. Or ``RANK`` and ``WORLD_SIZE`` are not numbers of a rank, or of several ranks where one was
            asked for.
    """
    if {"RANK", "WORLD_SIZE"} <= environ.keys():
        return _numbered(environ, alone)
    if alone:
        return None
    for launcher in (*_LAUNCHERS, _WHOLE_JOB) if _in_unsized_step(environ) else _LAUNCHERS:
        if job := launcher.job(environ):
            _check_launched(launcher, job, environ)
            return job
    _check_half_launched(environ)
    _warn_of_tasks(environ)
    return None


def _numbered(environ: Mapping[str, str], alone: bool) -> Job:
    """The job of ``RANK`` and ``WORLD_SIZE``, which both are set."""
    rank, size = (_number(environ, name) for name in ("RANK", "WORLD_SIZE"))
    said = f"RANK={environ['RANK']}, WORLD_SIZE={environ['WORLD_SIZE']}"
    if rank is None or size is None or rank >= size:
        problems = [f"{said}: expected two numbers, the first below the second"]
        reject(_VERB, problems, "torchrun sets both: torchrun --nproc-per-node <ranks> program.py.")
    assert rank is not None
    assert size is not None
    if alone and size > 1:
        advice = (
            "If a launcher started it, let the mesh have all ranks of the job: init_mesh(). If a rank started it (a "
            "subprocess, a notebook), it inherited the numbers of that rank. Start it without them, or delete them "
            "from os.environ:\n  env -u RANK -u WORLD_SIZE python program.py"
        )
        reject(_VERB, [f"{said}: this process is one of {size} ranks, but one rank was asked for"], advice)
    return Job(rank, size)


def _in_unsized_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a process of a job step whose size did not come through, as into a container."""
    in_step = "SLURM_STEP_ID" in environ or (_number(environ, "SLURM_PROCID") or 0) > 0
    return in_step and "SLURM_STEP_NUM_TASKS" not in environ


def _check_launched(launcher: _Launcher, job: Job, environ: Mapping[str, str]) -> None:
    """Raise unless it is known where rank 0 is, and ``WORLD_SIZE``, if it is set, is the launcher's."""
    said = f"{launcher.rank}={job.rank}, {launcher.size}={job.size}"
    if environ.get("WORLD_SIZE", str(job.size)) != str(job.size):
        problems = [f"WORLD_SIZE={environ['WORLD_SIZE']}, but {launcher.command} started {job.size} processes ({said})"]
        return reject(
            "init_mesh: the environment", problems, "Unset WORLD_SIZE, or start as many processes as it says."
        )
    unset = [name for name in _ADDRESS if name not in environ]
    if not unset:
        return None
    problem = (
        f"this is process {job.rank} of {job.size} that {launcher.command} started ({said}), but {' and '.join(unset)} "
        f"{'is' if len(unset) == 1 else 'are'} not set: {job.size} jobs of one rank each"
    )
    advice = (
        f"Start the program with torchrun, once on each host, or let the numbers of {launcher.command} count by saying "
        f"where rank 0 is:\n  {_TORCHRUN} program.py\n  export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500\n"
        "For jobs of one rank each, ask for one: init_mesh(1)."
    )
    return reject(_VERB, [problem], advice)


def _check_half_launched(environ: Mapping[str, str]) -> None:
    """Raise where only one of ``RANK`` and ``WORLD_SIZE`` is set, and does not say that there is one rank."""
    given = {name: environ[name] for name in ("RANK", "WORLD_SIZE") if name in environ}
    if not given or given == {"WORLD_SIZE": "1"}:
        return
    (name, value), (other,) = *given.items(), {"RANK", "WORLD_SIZE"} - given.keys()
    advice = (
        "torchrun sets both: torchrun --nproc-per-node <ranks> program.py. With Lightning's Fabric, call "
        "fabric.launch() first: init_mesh() then takes its process group. For one rank, ask for it: init_mesh(1)."
    )
    reject(_VERB, [f"{name}={value} is set, but {other} is not"], advice)


def _warn_of_tasks(environ: Mapping[str, str]) -> None:
    tasks = _number(environ, "SLURM_NTASKS") or 1
    if tasks > 1 and "SLURM_STEP_NUM_TASKS" not in environ:
        warnings.warn(
            f"init_mesh: one rank, although SLURM allocated {tasks} tasks: this process was not started by srun or "
            "torchrun. Start the program with one of them, or ask for one rank, init_mesh(1).",
            stacklevel=4,
        )
