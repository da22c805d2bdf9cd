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
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist  # for the store of the job and for who is in a group; no collectives

from ..torch_internals.tensors import job_store, timeout_of

T = TypeVar("T")
POLL = 0.1  # seconds between two looks, after an error
_LOST = ("gloo/transport/", "Operation timed out")  # what gloo's errors say; all are plain RuntimeErrors


def run_on_job(what: str, part: Callable[[], T]) -> T:
    """Return ``part()``, which waits for ranks of the default group: an error that one of them caused names it."""
    return run_on_group(what, dist.group.WORLD, part)


def run_on_group(what: str, group: Any, part: Callable[[], T]) -> T:
    """The same for ranks of ``group``."""
    try:
        return part()
    except RuntimeError as error:
        raise_named(error, what, group)
        raise


def raise_named(error: RuntimeError, what: str, group: Any) -> None:
    """Raise an error that names the ranks because of which ``what`` failed; return where none is missing."""
    if isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST):
        with suppress(ValueError):  # the process group was destroyed meanwhile: there is no store to ask
            store, window = job_store(), window_of(timeout_of(group))
            call = RollCall(store, what, dist.get_process_group_ranks(group), window)
            _in_thread(call.run, 3 * window)
            if text := call.explanation():
                raise RuntimeError(text) from error


def window_of(timeout: timedelta) -> float:
    """Seconds that a rank waits for others to sign in."""
    return min(max(timeout.total_seconds() / 10, 2.0), 10.0)


def _in_thread(run: Callable[[], None], seconds: float) -> None:
    """Wait for so long at most: a store whose host is stopped does not answer in time, or ever."""
    thread = Thread(target=run, name="functorch_shard lost ranks", daemon=True)
    thread.start()
    thread.join(seconds)


class _Board:
    """What ranks show each other in the store of the job, each once."""

    def __init__(self, store: Any, name: str) -> None:
        self.store, self._name, self.rank = store, name, dist.get_rank()

    def key(self, *parts: object) -> str:
        return "/".join(["functorch_shard", self._name, *map(str, parts)])

    def sign_in(self, text: str) -> None:
        if not self.store.check([self.key("here", self.rank)]):
            self.store.set(self.key("here", self.rank), text)

    def texts(self, ranks: Sequence[int]) -> dict[int, str]:
        here = [rank for rank in ranks if self.store.check([self.key("here", rank)])]
        return {rank: self.store.get(self.key("here", rank)).decode() for rank in here}

    def leave(self, ranks: Sequence[int], end: float) -> None:
        """Rank 0 may host the store: it stays until the others have read there, or until ``end``."""
        self.store.set(self.key("read", self.rank), "")
        unread = {*ranks} - {0}
        while self.rank == 0 and unread and time.monotonic() < end:
            unread = {rank for rank in unread if not self.store.check([self.key("read", rank)])}
            time.sleep(POLL / 10)


class RollCall:
    """Which ranks respond: one rank's part in Note [Lost ranks]."""

    def __init__(self, store: Any, what: str, members: Sequence[int], window: float) -> None:
        self._board, self._what, self._members, self._window = _Board(store, "lost ranks"), what, members, window
        self._text = ""  # who did not respond
        self._note = ""  # that others say so of this rank
        self._trouble = "no answer"

    def run(self) -> None:
        try:
            self._board.sign_in(self._what)
            self._text = self._listen() or self._conclude()
            self._trouble = ""
            self._board.leave(range(dist.get_world_size()), time.monotonic() + self._window)
        except RuntimeError as error:  # of the store; no harm once all is found
            self._trouble = self._trouble and str(error).partition("\n")[0]

    def explanation(self) -> str | None:
        """Why the collective failed; ``None`` where no rank is missing."""
        texts = [text for text in (self._text, self._note) if text]
        if self._trouble and not texts:
            guess = "it is not known which rank" if self._board.rank == 0 else "rank 0 probably"
            texts = [
                f"{guess} exited or stalled: the key/value store in which ranks sign in does not answer. Unless "
                f"torchrun hosts it, rank 0 does ({self._trouble})"
            ]
        return f"{self._what} failed: {'; '.join(texts)}" if texts else None

    def _listen(self) -> str:
        """What another rank concludes, until the window is over: twice as long where only others can know."""
        board, everybody, start = self._board, range(dist.get_world_size()), time.monotonic()
        while (passed := time.monotonic() - start) < self._window or (
            passed < 2 * self._window and not self._missing()
        ):
            if board.store.check([board.key("conclusion")]) and (text := self._read(board.store)):
                return text
            if len(board.texts(everybody)) == len(everybody):
                return ""
            time.sleep(POLL)
        return ""

    def _read(self, store: Any) -> str:
        """What another rank concluded, unless it is that this one does not respond."""
        missing, here, by, what = json.loads(store.get(self._board.key("conclusion")))
        if self._board.rank in missing:
            self._note = f"this rank, {self._board.rank}, did not respond to rank {by} within {self._window:g} s"
            return ""
        return self._sentence(missing, here, f" to rank {by} in its {what}")

    def _conclude(self) -> str:
        if missing := self._missing():
            here = [rank for rank in self._members if rank not in missing]
            mine = json.dumps([missing, here, self._board.rank, self._what])
            first = self._board.store.compare_set(self._board.key("conclusion"), "", mine)
            repeated = self._read(self._board.store) if json.loads(first) != json.loads(mine) else ""
            return repeated or self._sentence(missing, here, "")
        texts = self._board.texts(self._members)
        if self._note or len({*texts.values()}) == 1:
            return ""
        each = "; ".join(f"rank {rank}: {what}" for rank, what in texts.items())
        return f"all of its ranks responded, and wait for each other in different collectives ({each})"

    def _sentence(self, missing: Sequence[int], here: Sequence[int], to: str) -> str:
        responded = sorted({*here, self._board.rank} - {*missing})
        found = f"did not respond within {self._window:g} s{to} (exited or stalled)"
        return f"{_ranks(missing)} {found}; {_ranks(responded)} responded"

    def _missing(self) -> list[int]:
        here = self._board.texts(self._members)
        return [rank for rank in self._members if rank not in here]


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
