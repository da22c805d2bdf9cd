"""Real ranks for tests: gloo processes on this machine that answer, fail or time out, but never hang."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from .rank_process import RankProcess, start


class RankError(RuntimeError):
    """A rank of :func:`run_ranks` died, or did not answer in time."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``world_size`` gloo processes and return what each of them returned.

    Each process has one thread, an initialised process group, and ``fs.init_mesh()`` works. Arguments and results are
    pickled; a tree comes back without its ranks (``Layout.on`` puts it on another mesh).

    Args:
        fn: a function of a module, or a ``functools.partial`` of one: processes find it by its name.
        world_size: the number of ranks.
        args, kwargs: the same for every rank.
        timeout: seconds for all of it; after that every rank is ended.

    Returns:
        The results, in rank order.

    Raises:
        TypeError: the function, its arguments or its result cannot be sent to another process or found there, as what a
            notebook defines cannot.
        Exception: the first exception of any rank, of its own type, with its rank and traceback; the others are ended.
        RankError: a rank died without an exception, or did not answer in time; the message says which, and has the
            Python stack of each of its threads.

    Cost:
        The start of the processes: about as long as ``import torch``, the first time less than twice that.

    Example:
        >>> run_ranks(torch.distributed.get_rank, 2)
        [0, 1]
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size: got {world_size}, expected 1 or more")
    if multiprocessing.current_process().daemon:
        raise RuntimeError("run_ranks: called in a rank of run_ranks, or another process that may not start any.")
    work = _pickled((fn, args, kwargs, dict(os.environ)))
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="run_ranks_") as folder:
        ranks = [start(_rank_main, rank, world_size, folder, work, timeout) for rank in range(world_size)]
        try:
            return _collect(ranks, deadline, timeout)
        finally:
            for rank in ranks:
                rank.end()


def _collect(ranks: list[RankProcess], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {process.connection: rank for rank, process in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            late = sorted(waiting.values())
            where = "".join(_where(rank, ranks[rank]) for rank in late)
            raise RankError(f"run_ranks: no answer from rank {late} within {timeout:g} s; all were ended{where}")
        answers = _answers(ready, waiting)
        if not all(fine for fine, _ in answers.values()):
            answers |= _late_answers(waiting)
            _raise_first({rank: answer for rank, answer in answers.items() if not answer[0]}, ranks)
        results.update({rank: value for rank, (_, value) in answers.items()})
    return [results[rank] for rank in range(len(ranks))]


def _answers(ready: list[Any], waiting: dict[Connection, int]) -> dict[int, tuple[bool, Any]]:
    return {waiting[connection]: _receive(connection, waiting.pop(connection)) for connection in ready}


def _late_answers(waiting: dict[Connection, int], grace: float = 0.5) -> dict[int, tuple[bool, Any]]:
    """A rank that lost its peer may be heard before the peer's end is: the cause gets a moment to show itself."""
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + grace
    while waiting and (ready := wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))):
        answers |= _answers(ready, waiting)
    return answers


def _receive(connection: Connection, rank: int) -> tuple[bool, Any]:
    try:
        message = connection.recv_bytes()
    except (EOFError, OSError):
        return False, None
    try:
        return pickle.loads(message)
    except Exception as error:
        raise RankError(f"run_ranks: the answer of rank {rank} cannot be unpickled: {error!r}") from error


def _raise_first(failures: dict[int, tuple[bool, Any]], ranks: list[RankProcess]) -> None:
    """A rank that died comes first: others only report that it exited. Of those that raised, the first to raise."""
    died = [rank for rank, (_, value) in failures.items() if value is None]
    if died:
        rank = min(died)
        where = _where(rank, ranks[rank])  # ends it, if it only closed its connection
        code = ranks[rank].process.exitcode
        raise RankError(f"run_ranks: rank {rank} died without an answer, exit code {code}{where}")
    raised = {rank: value for rank, (_, value) in failures.items()}
    rank = min(raised, key=lambda rank: raised[rank][0])
    _, error, text = raised[rank]
    cause = RankError(f"on rank {rank}:\n{text}")
    raise _unpickled(error, text, rank) from cause


def _where(rank: int, process: RankProcess) -> str:
    stack = process.where()
    return f"\nrank {rank}: {stack}" if stack else ""


def _unpickled(error: bytes | None, text: str, rank: int) -> Exception:
    try:
        exception = pickle.loads(error) if error else None
    except Exception:
        exception = None
    if not isinstance(exception, Exception):  # cannot be pickled, or would end this process too, as SystemExit
        return RankError(f"run_ranks: rank {rank} raised what cannot be raised again here:\n{text}")
    return exception


def _pickled(work: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(work)
    except Exception as error:
        raise TypeError(
            f"run_ranks: {work[0]!r} or its arguments cannot be sent to another process ({error}). Pass a function "
            "that is defined at the top of a module, and plain data."
        ) from error


def _rank_main(connection: Connection, rank: int, world_size: int, folder: str, work: bytes, timeout: float) -> None:
    connection.send_bytes(_answer(rank, world_size, folder, work, timeout))
    connection.poll(None)  # until all have answered: others may still be connecting to this rank


def _answer(rank: int, world_size: int, folder: str, work: bytes, timeout: float) -> bytes:
    try:
        fn, args, kwargs, environ = _found(work)
        os.environ.update(environ)  # the server's is as old as the server
        _join_group(rank, world_size, folder, timeout)
        return _result(fn(*args, **kwargs))
    except BaseException as error:  # reported to the parent, whatever it is
        text = "".join(traceback.format_exception(error))
        return pickle.dumps((False, (time.time(), _pickle_error(error), text)))


def _found(work: bytes) -> tuple[Any, ...]:
    try:
        return pickle.loads(work)
    except Exception as error:
        raise TypeError(
            f"run_ranks: the function or its arguments were not found in another process ({error}). Define them at the "
            'top of a module that can be imported: not in a notebook, and not below `if __name__ == "__main__":`.'
        ) from error


def _result(value: Any) -> bytes:
    try:
        return pickle.dumps((True, value))
    except Exception as error:
        raise TypeError(
            f"run_ranks: a {type(value).__name__}, which the function returned, cannot be sent back ({error}). "
            "Return plain data, tensors and trees of them."
        ) from error


def _join_group(rank: int, world_size: int, folder: str, timeout: float) -> None:
    make_group(dist.FileStore(os.path.join(folder, "store"), world_size), rank, world_size, timeout)


def make_group(store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
    """The default process group of this rank."""
    torch.set_num_threads(1)
    if sys.platform == "linux":  # gloo asks for the host's name otherwise, which may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))


def _pickle_error(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:
        return None
