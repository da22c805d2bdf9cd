"""The ranks of a job meet, and make the process group they talk through.

Note [Fresh store]: torchrun keeps one key/value store for a job and all its restarts, and torch's gloo and NCCL leave
under the same keys how to reach a rank. Whoever starts again may read the address of a process that is gone, and then
waits for ever, or until torchrun has no restart left (https://github.com/pytorch/pytorch/issues/135712, mended for a
time by a new store per restart; torch 2.13 shares it again). Nothing that torchrun tells a rank says which life of the
job it is: agents count restarts on their own. So each process picks a name that nobody has had, rank 0 answers to names
with its own, and that one is the prefix of all that follows. A name of an earlier life is answered too, and read by
nobody; rank 0 goes on until every rank has signed under the new prefix.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

POLL = 0.01  # seconds between two looks of rank 0
MARGIN = timedelta(seconds=10)  # for rank 0 to say who is missing
DEFAULT = timedelta(minutes=30)  # torch's, for a store


def join_job(backend: str, timeout: timedelta | None) -> None:
    """Make the default process group of a job under torchrun, or anything else that sets ``RANK`` and the like."""
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout or DEFAULT))
    store.set_timeout(timeout or DEFAULT)
    prefix = meet(dist.PrefixStore("functorch_shard/start", store), rank, size, timeout or DEFAULT)
    fresh = dist.PrefixStore(prefix, store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=timeout)


def meet(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """A text that is the same on all ranks of this life of the job, and was never used before.

    Raises:
        RuntimeError: ranks did not come within ``timeout``; every rank that did names them.
    """
    name = uuid.uuid4().hex
    if rank == 0:
        missing = _await_others(store, name, range(1, size), timeout)
        store.set(f"{name}/missing", " ".join(map(str, missing)))
        return _all_here(name, missing, size, timeout)
    store.set(f"hello/{rank}", name)
    try:
        first = store.get(f"answer/{name}").decode()
        store.set(f"{first}/{rank}", "")
        store.wait([f"{first}/missing"], timeout + MARGIN)
        missing = store.get(f"{first}/missing").decode().split()
    except RuntimeError as error:  # torch's store errors are
        raise RuntimeError(f"rank 0 did not start, or ended, while rank {rank} waited for it: {error}") from error
    return _all_here(first, missing, size, timeout)


def _await_others(store: Any, name: str, others: Sequence[int], timeout: timedelta) -> Sequence[int]:
    """Answer everybody; who has not signed when the time is over."""
    end = time.monotonic() + timeout.total_seconds()
    answered: set[str] = set()
    while others and time.monotonic() < end:
        here = [rank for rank in others if store.check([f"hello/{rank}"])]
        for other in {store.get(f"hello/{rank}").decode() for rank in here} - answered:
            store.set(f"answer/{other}", name)
            answered.add(other)
        time.sleep(POLL)
        others = [rank for rank in others if not store.check([f"{name}/{rank}"])]
    return others


def _all_here(name: str, missing: Sequence[Any], size: int, timeout: timedelta) -> str:
    if missing:
        who, were = ", ".join(map(str, missing)), "was" if len(missing) == 1 else "were"
        raise RuntimeError(
            f"rank{'s' if len(missing) > 1 else ''} {who} of {size} {were} not there within "
            f"{timeout.total_seconds():g} s: the job needs all of them to start"
        )
    return name
