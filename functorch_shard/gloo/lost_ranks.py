"""A rank that raises, exits or stalls is named in the error of every other rank.

Note [Lost ranks]: torch says that a connection closed, or that a wait timed out, and not which rank caused it; and a
rank that exits because of it closes its own connections, which others then complain about. So a rank that meets such an
error signs in, with what failed, in the key/value store that the process group was made with. When its window is over,
it names those participants of the failed collective that did not sign in. The first to conclude writes that down, and
every other rank repeats it, also one of another row, which lost a rank that exited because of it.

The window is a tenth of the group's timeout, but at least 2 and at most 10 seconds. A rank that works for longer than
that between two collectives, or reached the same collective so much later, does not respond either and may be named
beside the one that exited. What is written stays as long as the store, and a program that goes on after such an error
needs a new process group with a new store, as init_mesh makes it under torchrun (Note [Fresh store] in launching.py).

Nothing is sent, asked or waited for before there is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, NoReturn

import torch.distributed as dist  # for the store of the job and for who is in a group; no collectives

from ..torch_internals.tensors import job_store, timeout_of

POLL = 0.1  # seconds between two looks, after an error
_LOST = ("gloo/transport/", "Operation timed out")  # what gloo's errors say; all are plain RuntimeErrors
_NO_STORE = (
    "rank 0 probably exited or stalled, unless torchrun hosts the key/value store in which ranks sign in: it does not "
    "answer"
)


def raise_named(error: RuntimeError, what: str, group: Any = None) -> NoReturn:
    """Raise an error that names the ranks because of which ``what`` failed, or ``error`` where none is missing."""
    if isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST):
        with suppress(ValueError):  # the process group was destroyed meanwhile: there is no store to ask
            window, found = window_of(timeout_of(group or dist.group.WORLD)), list[str]()
            args = job_store(), what, dist.get_process_group_ranks(group), window, found.append
            thread = Thread(target=_call_roll, args=args, name="functorch_shard lost ranks", daemon=True)
            thread.start()
            thread.join(3 * window)  # a store whose host is stopped does not answer in time, or ever
            if text := found[0] if found else _NO_STORE:
                raise RuntimeError(f"{what} failed: {text}") from error
    raise error


def window_of(timeout: timedelta) -> float:
    """Seconds that a rank waits for others to sign in."""
    return min(max(timeout.total_seconds() / 10, 2.0), 10.0)


def _call_roll(store: Any, what: str, members: Sequence[int], window: float, found: Callable[[str], None]) -> None:
    """One rank's part in Note [Lost ranks]: ``found`` gets who does not respond, or "" where all do."""
    me, everybody, end = dist.get_rank(), range(dist.get_world_size()), time.monotonic() + window
    here = lambda ranks: [rank for rank in ranks if store.check([_key("here", rank)])]  # noqa: E731
    try:
        if me not in here([me]):
            store.set(_key("here", me), what)
        # Twice as long where all members are here, so that only others can know who is not.
        while (now := time.monotonic()) < end or (now < end + window and here(members) == [*members]):
            if store.check([_key("conclusion")]) or here(everybody) == [*everybody]:
                break
            time.sleep(POLL)
        found(_concluded(store, members, here(members), window))
        # Rank 0 may host the store: it stays until the others have read there.
        store.add(_key("read"), 1)
        end = time.monotonic() + window
        while me == 0 and store.add(_key("read"), 0) < len(everybody) and time.monotonic() < end:
            time.sleep(POLL / 10)
    except RuntimeError:  # of the store; no harm once all is found
        found(_NO_STORE)


def _concluded(store: Any, members: Sequence[int], here: Sequence[int], window: float) -> str:
    """What the first rank concluded that missed others: this one, unless another one has."""
    missing = [rank for rank in members if rank not in here]
    text = f"{_ranks(missing)} did not respond within {window:g} s (exited or stalled); {_ranks(here)} responded"
    if missing:
        return store.compare_set(_key("conclusion"), "", text).decode()
    if store.check([_key("conclusion")]):
        return store.get(_key("conclusion")).decode()
    texts = {rank: store.get(_key("here", rank)).decode() for rank in members}
    each = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    differ = len({*texts.values()}) > 1
    return f"all of its ranks responded, and wait for each other in different collectives ({each})" if differ else ""


def _key(*parts: object) -> str:
    return "/".join(["functorch_shard", "lost ranks", *map(str, parts)])


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
