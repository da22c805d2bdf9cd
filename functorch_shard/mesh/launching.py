"""The process group of a job that torchrun started, or whatever else sets ``RANK`` and ``WORLD_SIZE``.

Note [Fresh store]: torchrun keeps one key/value store for a job and all its restarts, and torch's gloo and NCCL leave
under the same keys how to reach a rank: one that starts again may read the address of a process that exited, and wait
for ever (https://github.com/pytorch/pytorch/issues/135712). Agents count restarts on their own, so no number tells the
lives of a job apart. So each process picks a name that no process has had, and rank 0 answers to names with its own,
the prefix of all keys that follow, until the newest name of every rank has signed under it.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

# Where launchers say which of how many processes this is.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def is_launched() -> bool:
    """Return whether the environment has the rank of this process."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def check_alone() -> None:
    """Raise if a launcher started several processes and did not say so to torch: each would train alone."""
    values = {name: os.environ.get(name, "") for name in (*_RANKS, *_SIZES)}
    said = [f"{name}={x}" for name, x in values.items() if x.isdecimal() and int(x) > (name in _SIZES)]
    if said:
        raise ValueError(
            f"init_mesh: {', '.join(said)}: this process is one of several, and RANK and WORLD_SIZE are not both set. "
            "Start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables "
            "of the launcher: docs/start/real_ranks.md has them for SLURM and MPI. For one rank: init_mesh(1)."
        )


def make_group(device: torch.device, timeout: timedelta | None) -> None:
    """Make the default process group from the environment, bound to the accelerator of this rank."""
    # Its functions have the default group of the moment of the import as a default value, and would keep its threads
    # when the program destroys it. Torch imports it with its optimizers.
    import_module("torch.distributed.nn.functional")
    options: dict[str, Any] = {}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank, size, patience = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout or timedelta(minutes=30)
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=patience)
        fresh = dist.PrefixStore(fresh_prefix(store, rank, size, patience), store)
        options = {"store": fresh, "rank": rank, "world_size": size}
    bound = None if device.index is None else device
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=bound, timeout=timeout, **options)


def fresh_prefix(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Return a text that all ranks of this life of the job share, and none had before: Note [Fresh store]."""
    name = uuid.uuid4().hex
    store = dist.PrefixStore("functorch_shard/start", store)
    if rank:
        store.set(f"hello/{rank}", name)
        try:
            prefix = store.get(f"answer/{name}").decode()
        except RuntimeError as error:  # torch's store errors are
            raise RuntimeError(f"rank 0 did not start or ended, while rank {rank} waited for it: {error}") from error
        store.set(f"{prefix}/{rank}", name)
        return prefix
    end, answered = time.monotonic() + timeout.total_seconds(), {""}
    while True:
        newest = {other: _read(store, f"hello/{other}") for other in range(1, size)}
        for other in {*newest.values()} - answered:
            store.set(f"answer/{other}", name)
            answered.add(other)
        waiting = [other for other in newest if not newest[other] or _read(store, f"{name}/{other}") != newest[other]]
        if not waiting:
            return name
        if time.monotonic() > end:
            who = f"rank{'s' if len(waiting) > 1 else ''} {', '.join(map(str, waiting))} of {size}"
            raise RuntimeError(f"{who} did not respond within {timeout.total_seconds():g} s: the job needs all of them")
        time.sleep(0.01)


def _read(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
