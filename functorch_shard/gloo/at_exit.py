"""Finish or abandon pending collectives at interpreter exit, within a bounded time.

Note [Exit]: when Python frees modules, no thread of it runs any more. Who waits for one there waits for ever; and a
thread of gloo that ends a collective and frees its tensors then aborts the process. So before that, other ranks have a
while to take what they still need, as long as in Note [Lost ranks]. Then this rank ends its connections, by which all
pending collectives fail, here and on the others.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch

from ..communication.backend import wait_for_all
from ..communication.lost_ranks import POLL, window_of
from ..torch_internals.tensors import timeout_of

_TAG = 3 << 29  # of no message
_PAUSE = 0.05  # seconds: a thread of gloo frees what it has sent and received shortly after others can see its end
_MOMENT = 1.0  # seconds: pending collectives fail at once when connections end

# Pending collectives of guards that live, and of those that were freed. A forked process has those of its parent: it
# does not wait for them, nor free them, which waits for threads that it does not have.
_LIVE: WeakSet[Pending] = WeakSet()
_LEFT: list[Pending] = []


class Pending:
    """The collectives of one guard that are not over; each is a ``guard.Call``."""

    def __init__(self, group: Any) -> None:
        self.group, self.process = group, os.getpid()
        self.unverified: deque[Any] = deque()  # in the order in which they were sent
        self.abandoned: deque[Any] = deque()  # whose result nobody waits for
        for left in [left for left in _LEFT if left.process == self.process and left.have_arrived()]:
            wait_for_all(left.messages())
            _LEFT.remove(left)
        _LIVE.add(self)

    def have_arrived(self) -> bool:
        return all(call.arrived.done() for call in [*self.unverified])

    def messages(self) -> list[Any]:
        """Those over sockets whose result nobody wants, each with a ``wait``."""
        return [work for call in dict.fromkeys([*self.abandoned, *self.unverified]) for work in call.works]

    def close_abandoned(self) -> None:
        """Close those that all ranks have begun, so that what is still to be sent needs none of them."""
        for _ in range(len(self.abandoned)):
            with suppress(IndexError, RuntimeError):  # another thread may take it; what failed is over too
                call = self.abandoned.popleft()
                if call.verified:
                    call.wait_for_messages()
                    call.close()
                elif call.arrived is not None:
                    self.abandoned.append(call)

    def leave(self) -> None:
        """The guard is freed: unfinished messages are kept until they are over, or until Python exits."""
        mine = self.process == os.getpid() and not sys.is_finalizing()
        if mine and (self.messages() or not self.have_arrived()):
            _LEFT.append(self)


def _end() -> None:
    start, mine = time.monotonic(), [each for each in {*_LIVE, *_LEFT} if each.process == os.getpid()]
    for pending in mine:
        messages = pending.messages()
        if messages or not pending.have_arrived():
            end = start + window_of(timeout_of(pending.group))
            if not _await(pending.have_arrived, end):
                _disconnect(pending.group)
                _await(pending.have_arrived, time.monotonic() + _MOMENT)
            for message in messages:
                with suppress(RuntimeError):
                    message.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
    if mine:
        time.sleep(_PAUSE)


def _await(condition: Callable[[], bool], end: float) -> bool:
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(POLL / 100)
    return met


def _disconnect(group: Any) -> None:
    """Gloo ends a rank's connections where a wait has timed out: here for a message that nobody sends."""
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _TAG).wait(timedelta(milliseconds=1))


atexit.register(_end)
