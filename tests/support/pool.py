"""Real ranks from processes that stay: what ``fs.testing.run_ranks`` does, without the start of processes.

A call finds processes that have just joined a new group: the group of the call before is destroyed, and environment,
directory, random numbers, default dtype, grad mode and filters of warnings are those of a new process. What was
imported, cached or patched for good stays. So a test that ends a rank, compiles, measures memory or looks at imports
calls ``fs.testing.run_ranks``.

Most of a short call would be waiting: so groups meet at a store that stays, in this process, as a store in a file is
polled; and gloo's threads, whose end takes 20 ms, end while the next call begins.
"""

from __future__ import annotations

import _thread
import gc
import os
import pickle
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from functorch_shard.testing import processes
from functorch_shard.testing.processes import RankProcess, start

SEED = torch.initial_seed()  # of every process that has not chosen one

_pools: dict[str, list[RankProcess]] = {}  # the first n of one are the ranks of a call of n
_calls = count()


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, pool: str = "", **kwargs: Any
) -> list[Any]:
    """``fs.testing.run_ranks``, on processes of ``pool`` that serve later calls too; a call that fails ends its own."""
    work = pickle.dumps((fn, args, kwargs, dict(os.environ)))
    deadline = time.monotonic() + timeout
    ranks = _first(world_size, _pools.setdefault(pool, []))
    try:
        return _collect(ranks, work, deadline, timeout)
    except BaseException:
        _end(ranks, _pools[pool])
        raise


def _collect(ranks: list[RankProcess], work: bytes, deadline: float, timeout: float) -> list[Any]:
    store = f"{_store().port}/{next(_calls)}"
    for rank, process in enumerate(ranks):
        process.connection.send((os.getcwd(), (rank, len(ranks), store, work, timeout)))
    results = processes.collect(ranks, deadline, timeout)
    for process in ranks:
        process.connection.send("all have answered")
    return results


def _first(world_size: int, pool: list[RankProcess]) -> list[RankProcess]:
    while len(pool) < world_size:
        pool.append(start(_serve))
    return pool[:world_size]


@cache
def _store() -> dist.TCPStore:
    """Of all calls of this process."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _end(ranks: list[RankProcess], pool: list[RankProcess]) -> None:
    for process in ranks:
        pool.remove(process)
        process.end()


def _serve(connection: Connection) -> None:
    gc.freeze()  # what is loaded stays: a collection after each call need not look at it
    try:
        while True:
            directory, task = connection.recv()
            with _as_new(directory):
                rank, world_size, store, work, timeout = task
                join = partial(_join_group, rank, world_size, store, timeout)
                connection.send_bytes(processes.answer(join, work))
                connection.recv()  # until all have answered: others may still be connecting to this rank
    except (EOFError, OSError):  # the tests are over
        return


@cache
def _client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _join_group(rank: int, world_size: int, store: str, timeout: float) -> None:
    """Make the process group of a call by a part of its own of the store that stays."""
    port, call = store.split("/")
    processes.make_group(dist.PrefixStore(call, _client(int(port))), rank, world_size, timeout)


@contextmanager
def _as_new(directory: str) -> Iterator[None]:
    environ = dict(os.environ)
    os.chdir(directory)
    torch.manual_seed(SEED)
    random.seed()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        groups = [*dist.distributed_c10d._world.pg_map]
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environ)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        gc.collect()
        _thread.start_new_thread(groups.clear, ())  # the last to hold them
