"""A rank that raises, exits or stalls is named in the error of every other rank.

Note [Lost ranks]: torch says that a connection closed, or that a wait timed out, and not which rank caused it; and a
rank that exits because of it closes its own connections, which others then complain about. So a rank that meets such an
error signs in, with what failed, in the key/value store that the process group was made with. When its window is over,
it names those participants of the failed collective that did not sign in. The first to conclude writes that down, and
a rank that looks later, such as one of another row that lost a rank that had exited, repeats it.

The window is a tenth of the group's timeout, but at least 2 and at most 10 seconds. A rank that works for longer than
that between two collectives, or reached the same collective so much later, does not respond either and may be named
beside the one that exited; when it gets its own error, it concludes for itself. What is written stays as long as the
store, and a program that goes on after such an error needs a new process group with a new store, as init_mesh makes it
under torchrun (Note [Fresh store] in launching.py).

Nothing is sent, asked or waited for before there is an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist  # for the store of the job and for who is in a group; no collectives
from torch import Tensor

from ..torch_internals.process_groups import job_store, timeout_of
from .backend import Backend
from .collective import Collective
from .process_group import GroupBackend
from .work import Finished, Work
from .wrapper import Issue, Wrapped

T = TypeVar("T")
POLL = 0.1  # seconds between two looks, after an error
_LOST = ("gloo/transport/", "Operation timed out")  # what gloo's errors say; all are plain RuntimeErrors


def naming_lost_ranks(backend: GroupBackend) -> Backend:
    """``backend``, whose errors name the rank that caused them. One rank alone can lose none."""
    group = backend.group

    def issue(op: Collective, x: Tensor, send: Issue) -> Work:
        work = _run(op, group, send, op, x)
        return work if isinstance(work, Finished) else Work(lambda: _run(op, group, work.wait))

    return _Named(backend, issue) if backend.size > 1 else backend


class _Named(Wrapped):
    """A backend whose collectives are those of the one inside, with other errors."""


def run_on_job(what: str, part: Callable[[], T]) -> T:
    """``part()``, which waits for ranks of the default group: an error that one of them caused names it."""
    return _run(what, dist.group.WORLD, part)


def _run(what: Collective | str, group: Any, part: Callable[..., T], *args: Any) -> T:
    try:
        return part(*args)
    except RuntimeError as error:
        if not _is_of_lost_ranks(error):
            raise
        text = _explained(what if isinstance(what, str) else _text(what), group)
        if text is None:
            raise
        raise RuntimeError(text) from error


def _text(op: Collective) -> str:
    what = repr(op.key) if op.key else f"{op.numel:,} {str(op.dtype).removeprefix('torch.')}"
    return f"{op.kind} of {what} on axis {op.axis!r}"


def _is_of_lost_ranks(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST)


def _explained(what: str, group: Any) -> str | None:
    """Why ``what`` failed; None where no rank is missing, or there is no store to ask."""
    try:
        store = job_store()
    except ValueError:  # the process group was destroyed meanwhile
        return None
    check = _ResponseCheck(store, what, dist.get_process_group_ranks(group), window_of(timeout_of(group)))
    check.run()
    return check.explanation()


def window_of(timeout: timedelta) -> float:
    """Seconds that a rank waits for others to sign in."""
    return min(max(timeout.total_seconds() / 10, 2.0), 10.0)


@dataclass(frozen=True)
class _Conclusion:
    """What rank ``by`` found after its window; ranks are numbered as in the default group."""

    missing: Sequence[int]
    here: Sequence[int]
    by: int
    what: str
    window: float

    def text(self, rank: int) -> str:
        responded = sorted({*self.here, rank} - {*self.missing})
        found = f"within {self.window:g} s" + ("" if self.by == rank else f" to rank {self.by} in its {self.what}")
        return f"{_ranks(self.missing)} did not respond {found} (exited or stalled); {_ranks(responded)} responded"


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class _ResponseCheck:
    """Which ranks respond: one rank's part in Note [Lost ranks]."""

    def __init__(self, store: Any, what: str, participants: Sequence[int], window: float) -> None:
        self._store, self._what, self._participants, self._window = store, what, participants, window
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._found: _Conclusion | None = None
        self._verdict: _Conclusion | None = None  # of others, on this rank
        self._waiting: dict[int, str] = {}  # what each participant waits in, where none is missing
        self._trouble = "no answer"

    def run(self) -> None:
        """In a thread of its own: a store whose host is stopped does not answer in time, or ever."""
        thread = Thread(target=self._run, name="functorch_shard lost ranks", daemon=True)
        thread.start()
        thread.join(3 * self._window)

    def explanation(self) -> str | None:
        note = ""
        if by := self._verdict:
            note = f"this rank, {self._rank}, did not respond to rank {by.by} within {by.window:g} s"
        if self._found:
            text = self._found.text(self._rank) + (f"; {note}" if note else "")
        elif note:
            text = note
        elif self._trouble:
            guess = (
                "rank 0 probably exited or stalled" if self._rank else "it is not known which rank exited or stalled"
            )
            text = (
                f"{guess}: the key/value store in which ranks sign in does not answer. Unless torchrun hosts it, "
                f"rank 0 does ({self._trouble})"
            )
        elif len({*self._waiting.values()}) > 1:
            each = "; ".join(f"rank {rank}: {what}" for rank, what in self._waiting.items())
            text = f"all of its ranks responded, and wait for each other in different collectives ({each})"
        else:
            return None
        return f"{self._what} failed: {text}"

    def _run(self) -> None:
        try:
            self._sign_in()
            self._found = self._listen() or self._conclude()
            self._waiting = {} if self._found else self._waiting_in()
            self._trouble = ""
            self._store.set(_key("read", self._rank), "")
            self._linger()
        except RuntimeError as error:  # of the store; no harm once all is found
            self._trouble = self._trouble and str(error).partition("\n")[0]

    def _sign_in(self) -> None:
        if not self._store.check([_key("here", self._rank)]):
            self._store.set(_key("here", self._rank), self._what)
            self._store.add(_key("number here"), 1)

    def _listen(self) -> _Conclusion | None:
        """What another rank concludes, until the window is over: twice as long where only others can know."""
        end = time.monotonic() + self._window
        while time.monotonic() < end or (time.monotonic() < end + self._window and not self._missing()):
            if self._store.check([_key("conclusion")]):
                found = _Conclusion(**json.loads(self._store.get(_key("conclusion"))))
                if self._rank not in found.missing:
                    return found
                self._verdict = found
            if self._store.add(_key("number here"), 0) == self._size:
                return None
            time.sleep(POLL)
        return None

    def _conclude(self) -> _Conclusion | None:
        missing = self._missing()
        if not missing:
            return None
        here = [rank for rank in self._participants if rank not in missing]
        mine = _Conclusion(missing, here, self._rank, self._what, self._window)
        first = _Conclusion(**json.loads(self._store.compare_set(_key("conclusion"), "", json.dumps(asdict(mine)))))
        return mine if self._rank in first.missing else first

    def _missing(self) -> list[int]:
        return [rank for rank in self._participants if not self._store.check([_key("here", rank)])]

    def _waiting_in(self) -> dict[int, str]:
        if self._missing():
            return {}
        return {rank: self._store.get(_key("here", rank)).decode() for rank in self._participants}

    def _linger(self) -> None:
        """Rank 0 may host the store: it stays until the others have read there, or for another window."""
        end = time.monotonic() + self._window
        others = set(range(1, self._size)) - {*(self._found.missing if self._found else ())}
        while self._rank == 0 and others and time.monotonic() < end:
            others = {rank for rank in others if not self._store.check([_key("read", rank)])}
            time.sleep(POLL)


def _key(*parts: object) -> str:
    return "/".join(["functorch_shard", "lost ranks", *map(str, parts)])
