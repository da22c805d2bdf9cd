"""The one guard of gloo ranks: they issue the same collectives, and a rank that exits or stalls is named.

Note [Envelopes]: gloo pairs what ranks send by a counter, the k-th collective of one with the k-th of every other.
Where these are different ones, numbers of one unit are taken for another's if the sizes agree; if they do not, gloo
aborts the process, or ranks wait for each other until the timeout. So each collective here begins with one envelope
from every rank to every other one, which have one size whatever is sent: k-th meets k-th, and no size can be wrong. An
envelope says what the collective is (its kind, elements, dtype, and the buffer it is for), with a digest of that, and
has the message itself, if it is short. A message that is neither short nor in shared memory is sent at the same time,
under a tag that is drawn from the digest and the number of the collective. ``wait()`` first compares the digests of
this and all earlier collectives. All ranks have the same envelopes, find the same first difference, and raise the same
error; from then on they are out of step, and the axis refuses every collective.

Note [Lost ranks] in lost_ranks.py is what happens where an envelope, or a message, does not arrive.

Note [Exit]: when Python frees modules, no thread of it runs any more. Who waits for one there waits for ever; and a
thread of gloo that ends a collective and frees its tensors then aborts the process. So before that, other ranks have a
while to take what they still need, as long as in Note [Lost ranks]. Then this rank ends its connections, by which all
pending collectives fail, here and on the others.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from hashlib import blake2b
from threading import get_ident, main_thread
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..communication.backend import Work, wait_for_all
from ..communication.collective import Collective, describe
from ..communication.lost_ranks import POLL, raise_named, window_of
from ..torch_internals.tensors import timeout_of
from .shared_memory import Region

SMALL_MESSAGE = 1 << 14  # bytes of a message that is short for two ranks; for many ranks less
ALL_ENVELOPES = 1 << 15  # bytes of what one rank sends at most, while there are few ranks
HEAD = 256  # bytes before a short message: the digest, and what the collective is
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
_TAG = 3 << 29  # of no message
_PAUSE = 0.05  # seconds: a thread of gloo frees what it has sent and received shortly after others can see its end
_MOMENT = 1.0  # seconds: pending collectives fail at once when connections end

# A guard stays here while its owner lives or one of its messages is pending: Note [Exit] is for all of them.
_GUARDS: list[Guard] = []

Ranks = Mapping[int, Tensor]


class Call(Work):
    """One collective of gloo ranks; ``finish``, set before it is waited for, makes its result."""

    def __init__(self, guard: Guard, op: Collective, described: tuple[str, int, Tensor], number: int) -> None:
        self.guard, self.op, self.number = guard, op, number
        self.text, self.digest, self.head = described
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
        if guard.is_sending or self.number != guard.number + 1:
            guard.error = guard.error or INTERRUPTED
            raise RuntimeError(guard.error)
        guard.is_sending = True  # and stays so if an exception comes between
        try:
            if sends is not None and receives is not None:
                options = {"group": guard.group, "tag": 1 << 30 | (self.digest ^ self.number) & 0x3FFFFFFF}
                self.works = [
                    dist.irecv(_bytes_of(x), group_src=r, **options) for r, x in receives.items() if x.numel()
                ]
                self.works += [dist.isend(_bytes_of(x), group_dst=r, **options) for r, x in sends.items() if x.numel()]
            self.buffers = sent, got = guard.free.pop() if guard.free else guard.new_envelopes()
            sent[:, :HEAD] = self.head
            if rows is not None:
                sent[:, HEAD : HEAD + rows.shape[1] * rows.element_size()].view(rows.dtype).copy_(rows)
            self.work = guard.exchange(got, sent)
            self.arrived = self.work.get_future()
        except RuntimeError as error:
            raise_named(error, self.name, guard.group)
            raise
        guard.unverified.append(self)
        guard.number, guard.is_sending = self.number, False

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
            while self.works:  # who is interrupted by a signal has waited for those that are not there any more
                self.works.pop(0).wait()
            result = finish()
        except BaseException as error:  # also of a signal handler, between two waits
            self.guard.abandoned.append(self)
            if isinstance(error, RuntimeError):
                raise_named(error, self.name, self.guard.group)
            raise
        self.close()
        return result

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
            self.guard.abandoned.append(self)


class Guard:
    """The collectives of one rank over one process group, in their order, for as long as ``owner`` issues them."""

    def __init__(self, group: Any, size: int, owner: object) -> None:
        for guard in [each for each in _GUARDS if each.owner() is None and each.have_arrived()]:
            wait_for_all(guard.messages() if guard.process == os.getpid() else ())
            _GUARDS.remove(guard)
        self.capacity = max(min(ALL_ENVELOPES // size, SMALL_MESSAGE), 512) // 16 * 16  # bytes of a short message
        self.group, self._size, self.process, self.owner = group, size, os.getpid(), ref(owner)
        self.exchange = partial(dist.all_to_all_single, group=group, async_op=True)
        self.number, self.is_sending = 0, False  # of the last one that was sent
        self.error = ""
        self._history: deque[str] = deque(maxlen=HISTORY)
        self.unverified: deque[Call] = deque()  # in the order in which they were sent
        self.abandoned: deque[Call] = deque()  # whose result nobody waits for
        self.free = [self.new_envelopes() for _ in range(4)]  # to send and to receive; the same ones again and again
        _GUARDS.append(self)

    def call(self, op: Collective, numel: int) -> Call:
        """Return the next collective; what ``op`` is on ``numel`` elements is the same on all ranks, or it raises."""
        if self.is_sending:
            self.error = self.error or INTERRUPTED
        first = None
        while self.unverified and (first := _first(self.unverified)) and first.arrived.done():
            self.verify(first)
        first = None  # and so abandoned, if nobody waits for it
        self._refuse()
        for _ in range(len(self.abandoned)):
            with suppress(IndexError, RuntimeError):  # another thread may take it; what failed is over too
                abandoned = self.abandoned.popleft()
                if abandoned.verified:  # all ranks have begun it, so what is still to be sent does not need its end
                    while abandoned.works:
                        abandoned.works.pop(0).wait()
                    abandoned.close()
                elif abandoned.arrived is not None:
                    self.abandoned.append(abandoned)
        return Call(self, op, _described(op, numel, get_ident() == main_thread().ident), self.number + 1)

    def compare(self, op: Collective, numel: int) -> None:
        """Raise unless all ranks are at this collective, and wait for them."""
        call = self.call(op, numel)
        call.post()
        call.finish = lambda: torch.empty(0)
        call.wait()

    def new_envelopes(self) -> Sequence[Tensor]:
        with torch.inference_mode(False):
            sent = torch.zeros((self._size, HEAD + self.capacity), dtype=torch.uint8, device="cpu")
            return sent, torch.empty_like(sent)

    def verify(self, call: Call) -> None:
        """Raise unless this collective, and each one before it, is the same on all ranks."""
        while not call.verified:
            if self.error or self.process != os.getpid():
                self._refuse()
            first = _first(self.unverified) or call
            buffers = first.buffers
            first.work.wait()
            digests = buffers[1][:, :8].view(torch.int64).flatten().tolist() if buffers else ()
            if first.verified:  # by another thread meanwhile, which may have closed it
                continue
            if len({*digests}) == 1:
                first.verified = True  # no call before popleft: other threads run at calls
                self.unverified.popleft()
                self._history.append(first.text)
            else:
                self.error = self._explained(first)

    def _refuse(self) -> None:
        if self.process != os.getpid():
            raise RuntimeError(FORKED)
        if self.error:
            raise RuntimeError(self.error)

    def _explained(self, call: Call) -> str:
        ranks = dist.get_process_group_ranks(self.group)
        texts = [bytes(row).decode(errors="ignore").rstrip("\0") for row in call.buffers[1][:, 8:HEAD].tolist()]
        lines = [f"  rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True)]
        past = ["Before that, the same on all ranks:", *(f"  {text}" for text in self._history)]
        title = f"ranks {', '.join(map(str, ranks))} issue different collectives, each as its number {call.number}:"
        return "\n".join([title, *lines, *(past if self._history else []), ADVICE])

    def have_arrived(self) -> bool:
        return all(call.arrived.done() for call in [*self.unverified])

    def messages(self) -> list[Any]:
        """Those over sockets whose result nobody wants, each with a ``wait``."""
        return [work for call in dict.fromkeys([*self.abandoned, *self.unverified]) for work in call.works]

    def end(self) -> None:
        """Finish or abandon what is pending, within a bounded time."""
        messages, end = self.messages(), time.monotonic() + window_of(timeout_of(self.group))
        if not _await(self.have_arrived, end):
            with suppress(RuntimeError):  # gloo ends connections where a wait has timed out: here for no message
                lost = self.group.recv([torch.empty(1)], (self.group.rank() + 1) % self.group.size(), _TAG)
                lost.wait(timedelta(milliseconds=1))
            _await(self.have_arrived, time.monotonic() + _MOMENT)
        for message in messages:
            with suppress(RuntimeError):
                message.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))


def _first(calls: deque[Call]) -> Call | None:
    """The first call that is not verified; another thread may verify it at any time."""
    try:
        return calls[0]
    except IndexError:
        return None


@lru_cache(maxsize=4096)
def _described(op: Collective, numel: int, in_main_thread: bool) -> tuple[str, int, Tensor]:
    """What a collective is, a digest of it, and both as the head of an envelope."""
    text = describe(replace(op, numel=numel)) + ("" if in_main_thread else OTHER_THREAD)
    digest = blake2b(text.encode(), digest_size=8).digest()
    head = bytearray((digest + text.encode())[:HEAD].ljust(HEAD, b"\0"))
    with torch.inference_mode(False):
        return text, int.from_bytes(digest, "big", signed=True), torch.frombuffer(head, dtype=torch.uint8)


def _bytes_of(x: Tensor) -> Tensor:
    """The memory of ``x``, which is contiguous, as bytes."""
    return x.detach().flatten().unsqueeze(-1).view(torch.uint8)


def _await(condition: Callable[[], bool], end: float) -> bool:
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(POLL / 100)
    return met


@atexit.register
def _end_all() -> None:
    mine = [guard for guard in _GUARDS if guard.process == os.getpid()]
    for guard in mine:
        if guard.messages() or not guard.have_arrived():
            guard.end()
    if mine:
        time.sleep(_PAUSE)
