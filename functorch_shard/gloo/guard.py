"""The one guard of gloo ranks: they issue the same collectives, and a rank that exits or stalls is named.

Note [Envelopes]: gloo pairs what ranks send by a counter, the k-th collective of one with the k-th of every other.
Where these are different ones, numbers of one unit are taken for another's if the sizes agree; if they do not, gloo
aborts the process, or ranks wait for each other until the timeout. So each collective here begins with one envelope
from every rank to every other one, which have one size whatever is sent: k-th meets k-th, and no size can be wrong. An
envelope holds a digest of what the collective is (its kind, elements, dtype, and the buffer it is for), and the message
itself, if it is short. A message that is neither short nor in shared memory is sent at the same time, under a tag that
is drawn from the digest and the number of the collective. ``wait()`` first compares the digests of this and all earlier
collectives. All ranks have the same digests, find the same first difference, and raise the same error; from then on
they are out of step, and the axis refuses every collective.

Note [Lost ranks] in lost_ranks.py is what happens where an envelope, or a message, does not arrive.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from threading import get_ident, main_thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..communication.backend import Work
from ..communication.collective import Collective, describe
from ..communication.lost_ranks import raise_named, texts_of_all
from .at_exit import Pending
from .shared_memory import Region

SMALL_MESSAGE = 1 << 14  # bytes of a message that is short for two ranks; for many ranks less
ALL_ENVELOPES = 1 << 15  # bytes of what one rank sends at most, while there are few ranks
HEAD = 16  # bytes before a short message: the digest, and what aligns the message
HISTORY = 5  # how many collectives before the one that differs an error shows
OTHER_THREAD = ", not in the main thread"  # so that messages of two threads are not taken for each other's
FORKED = (
    "This process was forked from a rank, for example by a DataLoader with workers, and cannot issue collectives or "
    "wait for those of its parent. Give it whole values: gather(params, lazy=False) before the fork."
)
INTERRUPTED = (
    "A collective was interrupted while it was sent, by an exception (of a signal handler, or for lack of memory), or "
    "two threads issue collectives over one process group at the same time. Other ranks may have received a part of "
    "it: start again with a new process group, and with one for each thread."
)
ADVICE = (
    "All ranks must use the same units in the same order: look for a branch, a loop or an early return that depends on "
    "the rank or its data. What only some ranks use, gather with lazy=False inside of fs.grad: then what a rank does "
    "not use counts as zeros there. The ranks are out of step now: start again with a new process group."
)


Ranks = Mapping[int, Tensor]


class Call(Work):
    """One collective of gloo ranks; ``finish``, set before it is waited for, makes its result."""

    def __init__(self, guard: Guard, op: Collective, text: str, digest: int, number: int) -> None:
        self.guard, self.op, self.text, self.digest, self.number = guard, op, text, digest, number
        self.finish: Callable[[], Tensor] | None = None
        self.region: Region | None = None
        self.works: list[Any] = []  # messages over sockets
        self.buffers: Sequence[Tensor] = ()  # envelopes, sent and received
        self.work: Any = None
        self.arrived: Any = None  # a future: unlike is_completed of a work, it takes no lock that gloo's threads hold
        self.verified = False

    def post(self, rows: Tensor | None = None, sends: Ranks | None = None, receives: Ranks | None = None) -> None:
        """Send the envelopes.

        Args:
            rows: short messages to send in them: one for every rank, or one for all.
            sends, receives: long messages over sockets, by rank; contiguous.
        """
        guard = self.guard
        guard.begin(self)
        try:
            if sends is not None and receives is not None:
                options = {"group": guard.group, "tag": 1 << 30 | (self.digest ^ self.number) & 0x3FFFFFFF}
                self.works = [
                    dist.irecv(_bytes_of(x), group_src=r, **options) for r, x in receives.items() if x.numel()
                ]
                self.works += [dist.isend(_bytes_of(x), group_dst=r, **options) for r, x in sends.items() if x.numel()]
            self.buffers = sent, got = guard.free.pop() if guard.free else guard.new_envelopes()
            sent[:, :8].view(torch.int64).fill_(self.digest)
            if rows is not None:
                sent[:, HEAD : HEAD + rows.shape[1] * rows.element_size()].view(rows.dtype).copy_(rows)
            self.work = guard.exchange(got, sent)
            self.arrived = self.work.get_future()
        except RuntimeError as error:
            raise_named(error, self.name, guard.group)
            raise
        guard.sent(self)

    @property
    def name(self) -> str:
        return f"{self.op} on axis {self.op.axis!r}"

    def then(self, change: Callable[[Tensor], Tensor]) -> Work:
        finish = self.finish
        assert finish is not None
        self.finish = lambda: change(finish())
        return self

    def wait(self) -> Tensor:
        finish, self.finish = self.finish, None
        assert finish is not None, "a Work is waited for once"
        try:
            self.guard.verify(self)
            if self.works:
                self.wait_for_messages()
            result = finish()
        except BaseException as error:  # also of a signal handler, between two waits
            self.guard.pending.abandoned.append(self)
            if isinstance(error, RuntimeError):
                raise_named(error, self.name, self.guard.group)
            raise
        self.close()
        return result

    def wait_for_messages(self) -> None:
        while self.works:  # who is interrupted by a signal has waited for those that are not there any more
            self.works.pop(0).wait()

    def rows(self, nbytes: int, dtype: torch.dtype) -> Tensor:
        """The short messages of all ranks: one row each, to be read before the call is closed."""
        return self.buffers[1][:, HEAD : HEAD + nbytes].view(dtype)

    def memory(self) -> Tensor:
        """The bytes of all ranks in shared memory."""
        region, self.region = self.region, None
        assert region
        return region.open()

    def close(self) -> None:
        """The messages are not read any more, in the envelopes or in shared memory."""
        if self.verified and self.buffers:
            if self.region:
                self.region.free()
            self.guard.free.append(self.buffers)
            self.buffers = ()

    def __del__(self) -> None:
        """Nobody waited for it: the guard closes it once all ranks have sent. Note [Abandoned] in backend.py."""
        if self.finish and self.buffers:
            self.guard.pending.abandoned.append(self)


class Guard:
    """The collectives of one rank over one process group, in their order."""

    def __init__(self, group: Any, size: int) -> None:
        self.capacity = max(min(ALL_ENVELOPES // size, SMALL_MESSAGE), 512) // 16 * 16  # bytes of a short message
        self.group, self._size, self._process = group, size, os.getpid()
        self.exchange = partial(dist.all_to_all_single, group=group, async_op=True)
        self._number, self._sending = 0, 0  # of the last one that was sent, and of one that is being sent
        self._history: deque[str] = deque(maxlen=HISTORY)
        self._error = ""
        self.pending = Pending(group)
        self.free = [self.new_envelopes() for _ in range(4)]  # to send and to receive; the same ones again and again

    def call(self, op: Collective, numel: int) -> Call:
        """Return the next collective; what ``op`` is on ``numel`` elements is the same on all ranks, or it raises."""
        if self._sending:
            self._error = self._error or INTERRUPTED
        pending, first = self.pending, None
        while pending.unverified and (first := _first(pending.unverified)) and first.arrived.done():
            self.verify(first)
        first = None  # and so abandoned, if nobody waits for it
        self._refuse()
        if pending.abandoned:
            pending.close_abandoned()
        return Call(self, op, *_described(op, numel, get_ident() == main_thread().ident), self._number + 1)

    def compare(self, op: Collective, numel: int) -> None:
        """Raise unless all ranks are at this collective, and wait for them."""
        call = self.call(op, numel)
        call.post()
        call.finish = lambda: torch.empty(0)
        call.wait()

    def begin(self, call: Call) -> None:
        if call.number != self._number + 1 or self._sending not in (0, call.number):
            self._error = self._error or INTERRUPTED
            self._refuse()
        self._sending = call.number

    def new_envelopes(self) -> Sequence[Tensor]:
        with torch.inference_mode(False):
            sent = torch.zeros((self._size, HEAD + self.capacity), dtype=torch.uint8, device="cpu")
            return sent, torch.empty_like(sent)

    def sent(self, call: Call) -> None:
        self.pending.unverified.append(call)
        self._number, self._sending = call.number, 0

    def verify(self, call: Call) -> None:
        """Raise unless this collective, and each one before it, is the same on all ranks."""
        unverified = self.pending.unverified
        while not call.verified:
            if self._error or self._process != os.getpid():
                self._refuse()
            first = _first(unverified) or call
            buffers = first.buffers
            first.work.wait()
            digests = buffers[1][:, :8].view(torch.int64).flatten().tolist() if buffers else ()
            if first.verified:  # by another thread meanwhile, which may have closed it
                continue
            if len({*digests}) == 1:
                first.verified = True  # no call before popleft: other threads run at calls
                unverified.popleft()
                self._history.append(first.text)
            else:
                self._error = self._explained(first, digests)

    def _refuse(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(FORKED)
        if self._error:
            raise RuntimeError(self._error)

    def _explained(self, call: Call, digests: Sequence[int]) -> str:
        ranks = dist.get_process_group_ranks(self.group)
        texts = texts_of_all(self.group, call.number, call.text)
        same = [rank for rank, digest in zip(ranks, digests, strict=True) if digest == call.digest]
        lines = [f"  rank {rank}: {call.text if rank in same else texts.get(rank, 'another one')}" for rank in ranks]
        past = ["Before that, the same on all ranks:", *(f"  {text}" for text in self._history)]
        title = f"ranks {', '.join(map(str, ranks))} issue different collectives, each as its number {call.number}:"
        return "\n".join([title, *lines, *(past if self._history else []), ADVICE])

    def __del__(self) -> None:
        self.pending.leave()


def _first(calls: deque[Call]) -> Call | None:
    """The first call that is not verified; another thread may verify it at any time."""
    try:
        return calls[0]
    except IndexError:
        return None


@lru_cache(maxsize=4096)
def _described(op: Collective, numel: int, in_main_thread: bool) -> tuple[str, int]:
    """What a collective is, and a digest of it."""
    text = describe(replace(op, numel=numel)) + ("" if in_main_thread else OTHER_THREAD)
    return text, int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _bytes_of(x: Tensor) -> Tensor:
    """The memory of ``x``, which is contiguous, as bytes."""
    return x.detach().flatten().unsqueeze(-1).view(torch.uint8)
