"""Real ranks for tests: gloo processes on this machine that answer, fail or time out, but never hang."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_MOST = 1 << 16  # bytes: what a pipe holds


class RankError(RuntimeError):
    """A rank of :func:`run_ranks` died, or did not answer in time."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``world_size`` gloo processes and return what each of them returned.

    Each process has one thread, an initialised process group, and ``fs.init_mesh()`` works. Arguments and results are
    pickled; a tree comes back without its ranks (``Layout.on`` puts it on another mesh).

    Args:
        fn: a function at the top of a module that can be imported, or a ``functools.partial`` of one. Processes find it
            by its name, and so no lambda, and nothing that a notebook defines.
        world_size: the number of ranks.
        args, kwargs: the same for every rank.
        timeout: seconds for all of it; after that every rank is ended.

    Returns:
        The results, in rank order.

    Raises:
        Exception: what ``pickle`` raises of the function, its arguments or its result; or the first exception of any
            rank, of its own type, with its rank and traceback. The others are ended.
        RankError: a rank died without an exception, or did not answer in time; the message says which, and has the
            Python stack of each of its threads.

    Cost:
        The start of the processes: about as long as ``import torch``, the first time less than twice that.

    Example:
        >>> run_ranks(torch.distributed.get_rank, 2)
        [0, 1]
    """
    work, deadline = pickle.dumps((fn, args, kwargs, dict(os.environ))), time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="run_ranks_") as folder:
        ranks = [start(_rank_main, rank, world_size, folder, work, timeout) for rank in range(world_size)]
        try:
            return collect(ranks, deadline, timeout)
        finally:
            for rank in ranks:
                rank.end()


@dataclass(frozen=True)
class RankProcess:
    """A process that is a rank: it answers over one pipe, and another one has its stack when a signal ended it."""

    process: Any
    connection: Connection
    _stack: Connection

    def where(self, rank: int) -> str:
        """Return the Python stack of each thread when a signal ended it, which is now if it still runs."""
        if self.process.is_alive():
            with suppress(ProcessLookupError):  # it ended in between
                os.kill(self.process.pid, signal.SIGABRT)
        self.process.join(5)
        found = wait([self._stack], timeout=0)  # one that is stopped writes nothing
        text = os.read(self._stack.fileno(), _MOST).decode(errors="replace").strip() if found else ""
        return f"\nrank {rank}: {text}" if text else ""

    def end(self) -> None:
        self.process.kill()  # answered, or not wanted any more: nothing is lost
        self.process.join()
        self.connection.close()
        self._stack.close()


def start(main: Callable[..., None], *args: Any) -> RankProcess:
    """Start ``main(connection, *args)`` in a process of its own."""
    context = new_processes()
    here, there = context.Pipe()
    stack, written = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(written, main, there, *args), daemon=True)
    process.start()
    there.close()
    written.close()
    return RankProcess(process, here, stack)


def _main(stack: Connection, main: Callable[..., None], *args: Any) -> None:
    faulthandler.enable(stack.fileno())
    main(*args)


def new_processes() -> Any:
    """New processes from a server that has torch loaded: a start takes a tenth of a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def collect(ranks: Sequence[RankProcess], deadline: float, timeout: float) -> list[Any]:
    """Return the result of each rank, or raise the first failure."""
    results: dict[int, Any] = {}
    waiting = {process.connection: rank for rank, process in enumerate(ranks)}
    while waiting:
        answers = _received(waiting, max(deadline - time.monotonic(), 0))
        if not answers:
            late = sorted(waiting.values())
            where = "".join(ranks[rank].where(rank) for rank in late)
            raise RankError(f"run_ranks: no answer from rank {late} within {timeout:g} s; all were ended{where}")
        if not all(fine for fine, _ in answers.values()):
            end = time.monotonic() + 0.5  # a rank that lost its peer may be heard before the peer's end is
            while waiting and (more := _received(waiting, max(end - time.monotonic(), 0))):
                answers |= more
            _raise_first({rank: value for rank, (fine, value) in answers.items() if not fine}, ranks)
        results.update({rank: value for rank, (_, value) in answers.items()})
    return [results[rank] for rank in range(len(ranks))]


def _received(waiting: dict[Connection, int], seconds: float) -> dict[int, tuple[bool, Any]]:
    """The answers that come within ``seconds``, whose ranks are not waited for any more."""
    answers: dict[int, tuple[bool, Any]] = {}
    for connection in wait(list(waiting), timeout=seconds):
        assert isinstance(connection, Connection)
        rank = waiting.pop(connection)
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            answers[rank] = False, None
            continue
        answers[rank] = pickle.loads(message)
    return answers


def _raise_first(failures: dict[int, Any], ranks: Sequence[RankProcess]) -> None:
    """A rank that died comes first: others only report that it exited. Of those that raised, the first to raise."""
    if died := [rank for rank, value in failures.items() if value is None]:
        rank = min(died)
        where = ranks[rank].where(rank)  # ends it, if it only closed its connection
        code = ranks[rank].process.exitcode
        raise RankError(f"run_ranks: rank {rank} died without an answer, exit code {code}{where}")
    rank = min(failures, key=lambda rank: failures[rank][0])
    _, error, text = failures[rank]
    exception = None
    with suppress(Exception):
        exception = pickle.loads(error) if error else None
    if not isinstance(exception, Exception):  # cannot be pickled, or would end this process too, as SystemExit
        exception = RankError(f"run_ranks: rank {rank} raised what cannot be raised again here:\n{text}")
    raise exception from RankError(f"on rank {rank}:\n{text}")


def _rank_main(connection: Connection, rank: int, world_size: int, folder: str, work: bytes, timeout: float) -> None:
    join = lambda: make_group(dist.FileStore(f"{folder}/store", world_size), rank, world_size, timeout)  # noqa: E731
    connection.send_bytes(answer(join, work))
    connection.poll(None)  # until all have answered: others may still be connecting to this rank


def answer(join: Callable[[], None], work: bytes) -> bytes:
    """Return what this rank sends back, after ``join`` made its process group: a result, or its error."""
    try:
        fn, args, kwargs, environ = pickle.loads(work)
        os.environ.update(environ)  # the server's is as old as the server
        join()
        return pickle.dumps((True, fn(*args, **kwargs)))
    except BaseException as error:  # reported to the parent, whatever it is
        sent = None
        with suppress(Exception):
            sent = pickle.dumps(error)
        return pickle.dumps((False, (time.time(), sent, "".join(traceback.format_exception(error)))))


def make_group(store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
    """Make the default process group of this rank."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo asks for the host's name otherwise, which may not resolve
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
