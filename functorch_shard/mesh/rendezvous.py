"""The ranks of a job meet, and make the process group they talk through.

Note [Fresh store]: torchrun keeps one key/value store for a job and all its restarts, and torch's gloo and NCCL leave
under the same keys how to reach a rank. Whoever starts again may read the address of a process that exited, and then
waits for ever, or until torchrun has no restart left (https://github.com/pytorch/pytorch/issues/135712, mended for a
time by a new store per restart; torch 2.13 shares it again). Nothing that torchrun gives a rank says which life of the
job it is: agents count restarts on their own. So each process picks a name that no process has had, rank 0 answers to
names with its own, and that one is the prefix of all that follows. A name of an earlier life is answered too, and not
read; rank 0 goes on until the newest name of every rank has signed under the new prefix.

Note [Default arguments]: functions of ``torch.distributed.nn.functional`` have the default group as a default value,
that of the moment when the module is imported, which torch does with its optimizers. They would keep a group, and its
threads, that the program destroyed; and a process that exits with threads of gloo ends now and then by SIGABRT. So it
is imported before there is a group.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ..errors import reject
from .launchers import Job

POLL = 0.01  # seconds between two looks of rank 0
MARGIN = timedelta(seconds=10)  # for rank 0 to say who is missing
LINGER = 5.0  # seconds, where somebody is missing
DEFAULT = timedelta(minutes=30)  # torch's, for a store


def join_job(job: Job, device: torch.device, timeout: timedelta | None) -> None:
    """Make the default process group of a job that torchrun started, or anything else that says where rank 0 is.

    It is bound to an accelerator: torch guesses a device from the number of the rank otherwise, and connects later.
    """
    unset = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    advice = "RANK and WORLD_SIZE are set: so is to be where rank 0 is found. torchrun sets all four."
    reject("init_mesh: the environment", [f"{name}: not set" for name in unset], advice)
    patience = timeout or DEFAULT
    store = _store(job, patience)
    prefix = meet(dist.PrefixStore("functorch_shard/start", store), job.rank, job.size, patience)
    fresh = dist.PrefixStore(prefix, store)
    import_module("torch.distributed.nn.functional")  # Note [Default arguments]
    backend, bound = dist.get_default_backend_for_device(device), device if device.index is not None else None
    options: dict[str, Any] = {"store": fresh, "rank": job.rank, "world_size": job.size, "timeout": timeout}
    dist.init_process_group(backend, device_id=bound, **options)


def _store(job: Job, timeout: timedelta) -> Any:
    """torchrun's own, or one that rank 0 keeps: torch's ``env://``, which waits there for all and names none.

    A rank that is alone needs no other process to find it, and no port, which a process that it started may have taken.
    """
    if job.size == 1:
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = job.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
        return dist.TCPStore(host, port, None, keeps, **options)
    except RuntimeError as error:
        where = f"{host}:{port}, where rank 0 or torchrun keeps it"
        raise RuntimeError(f"rank {job.rank} found no store at {where}") from error


def meet(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """A text that is the same on all ranks of this life of the job, and was never used before.

    Raises:
        RuntimeError: ranks did not respond within ``timeout``; every rank that did names them.
    """
    name = uuid.uuid4().hex
    if rank == 0:
        missing = _await_others(store, name, range(1, size), timeout)
        store.set(f"{name}/missing", " ".join(map(str, missing)))
        if missing:
            _linger(store, name, set(range(1, size)) - {*missing})
        return _all_here(name, missing, size, timeout)
    store.set(f"hello/{rank}", name)
    try:
        first = store.get(f"answer/{name}").decode()
        store.set(f"{first}/{rank}", name)
        store.wait([f"{first}/missing"], timeout + MARGIN)
        missing = store.get(f"{first}/missing").decode().split()
        store.set(f"{first}/read/{rank}", "")
    except RuntimeError as error:  # torch's store errors are
        why = "did not start, or ended, or began without this rank, which came again"
        raise RuntimeError(f"rank 0 {why}, while rank {rank} waited for it: {error}") from error
    return _all_here(first, missing, size, timeout)


def _await_others(store: Any, name: str, others: Sequence[int], timeout: timedelta) -> Sequence[int]:
    """Answer all ranks, also those that restart; returns those whose newest name did not sign in time."""
    end, pause = time.monotonic() + timeout.total_seconds(), POLL * (1 + len(others) / 100)
    answered: set[str] = set()
    missing = others
    while missing and time.monotonic() < end:
        newest = {rank: _read(store, f"hello/{rank}") for rank in others}
        for other in {*newest.values()} - answered - {""}:
            store.set(f"answer/{other}", name)
            answered.add(other)
        time.sleep(pause)
        missing = [rank for rank in others if not newest[rank] or _read(store, f"{name}/{rank}") != newest[rank]]
    return missing


def _read(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _linger(store: Any, name: str, others: set[int]) -> None:
    """Rank 0 may keep the store: it stays until the others have read there what is missing, or for a moment."""
    end = time.monotonic() + LINGER
    while others and time.monotonic() < end:
        others = {rank for rank in others if not store.check([f"{name}/read/{rank}"])}
        time.sleep(POLL)


def _all_here(name: str, missing: Sequence[Any], size: int, timeout: timedelta) -> str:
    if missing:
        who = ", ".join(map(str, missing))
        raise RuntimeError(
            f"rank{'s' if len(missing) > 1 else ''} {who} of {size} did not respond within "
            f"{timeout.total_seconds():g} s: the job needs all of them to start"
        )
    return name
