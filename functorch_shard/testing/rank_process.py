"""A process that is a rank: it answers over a pipe, and over another one says where it was when a signal ended it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

_MOST = 1 << 16  # bytes: what a pipe holds


@dataclass(frozen=True)
class RankProcess:
    """A rank as its parent sees it."""

    process: Any
    connection: Connection
    _stack: Connection

    def where(self, seconds: float = 5.0) -> str:
        """The Python stack of each thread when a signal ended it, which is now if it still runs; empty if unknown."""
        if self.process.is_alive():
            with suppress(ProcessLookupError):  # it ended in between
                os.kill(self.process.pid, signal.SIGABRT)
        self.process.join(seconds)
        found = wait([self._stack], timeout=0)  # one that is stopped writes nothing
        return os.read(self._stack.fileno(), _MOST).decode(errors="replace").strip() if found else ""

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
    """New processes from a server that has torch loaded, where there is one: a start takes a tenth of a second."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["functorch_shard.testing.processes"])
    return context
