"""A process that ends: what is under way is over before, and is not waited for for long.

Note [Exit]: when Python frees modules, no thread of it runs any more. Who waits for one there waits for ever; and a
thread of gloo that ends a collective and frees its tensors then aborts the process. So before that, other ranks have a
while to take what they still need, as long as in Note [Lost ranks]. Then this rank ends its connections, by which all
that is under way fails, here and on the others.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, Protocol
from weakref import WeakSet

import torch

from ..torch_internals.process_groups import timeout_of
from .lost_ranks import POLL, window_of
from .work import wait_for_all

_TAG = 3 << 29  # of no message
_PAUSE = 0.05  # seconds: a thread of gloo frees what it has sent and received shortly after others can see its end
_MOMENT = 1.0  # seconds: what is under way fails at once when connections end


class Line(Protocol):
    """What has collectives under way over ``group``."""

    group: Any

    def under_way(self) -> tuple[Callable[[], bool], Sequence[Any]]:
        """Whether the envelopes have arrived; and messages whose result nobody wants, each with a ``wait``."""
        ...


_LINES: WeakSet[Any] = WeakSet()
_LEFT: list[Left] = []
_OF_PARENTS: list[Left] = []  # never freed: what frees a group waits for its threads, which a forked process has not


def watch(line: Line) -> None:
    """Let what ``line`` has under way be over before this process ends."""
    _LINES.add(line)


class Left:
    """Messages that nobody wants, kept by a thread until they were sent and received."""

    def __init__(self, group: Any, works: Sequence[Any]) -> None:
        self.group, name = group, "functorch_shard abandoned collectives"
        self._thread = Thread(target=wait_for_all, args=(works,), name=name, daemon=True)
        self._thread.start()

    def under_way(self) -> tuple[Callable[[], bool], Sequence[Any]]:
        return lambda: not self._thread.is_alive(), ()


def leave(group: Any, works: Sequence[Any], process: int) -> None:
    """Keep ``works`` of ``process``, which is this one unless it was forked, until they are over."""
    if works and process == os.getpid() and not sys.is_finalizing():
        with suppress(RuntimeError):  # no more threads
            _LEFT[:] = [*(left for left in _LEFT if not left.under_way()[0]()), Left(group, works)]


def _end() -> None:
    start = time.monotonic()
    for line in [*_LINES, *_LEFT]:
        have_arrived, works = line.under_way()
        if works or not have_arrived():
            _end_all(line.group, have_arrived, works, start + window_of(timeout_of(line.group)))
    if _LINES:
        time.sleep(_PAUSE)


def _end_all(group: Any, have_arrived: Callable[[], bool], works: Sequence[Any], end: float) -> None:
    if not _await(have_arrived, end):
        _disconnect(group)
        _await(have_arrived, time.monotonic() + _MOMENT)
    for work in works:
        with suppress(RuntimeError):
            work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))


def _await(condition: Callable[[], bool], end: float) -> bool:
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(POLL / 100)
    return met


def _disconnect(group: Any) -> None:
    """Gloo ends a rank's connections where a wait has timed out: here for a message that nobody sends."""
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _TAG).wait(timedelta(milliseconds=1))


def _forget() -> None:
    """A process that was forked has no part in what is under way."""
    _LINES.clear()
    _OF_PARENTS.extend(_LEFT)
    _LEFT.clear()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
