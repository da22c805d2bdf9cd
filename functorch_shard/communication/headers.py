"""Every collective of gloo ranks says what it is, and ranks that issue different ones all get the same error.

Note [Envelopes]: gloo pairs what ranks send by a counter, the k-th collective of one with the k-th of every other.
Where these are different ones, numbers of one unit are taken for another's if the sizes agree; if they do not, gloo
aborts the process, or ranks wait for each other until the timeout. So each collective here begins with one envelope
from every rank to every other one, which have one size whatever is sent: k-th meets k-th, and no size can be wrong. An
envelope holds

1. a digest of what the collective is: its kind, elements, dtype, and the buffer it is for,
2. where in shared memory the sender's message is, if it is there,
3. the message itself, if it is short.

A message that is neither short nor in shared memory is sent at the same time, under a tag that is drawn from the digest
and the number of the collective, and is received under no other. Whoever waits for a collective looks at the digests of
it, and of all before it, first. So nothing is sent or waited for that would not be without digests.

Every rank has the digests of all ranks, and so all of them find the same first difference. Then each writes its own
collective into the key/value store of the job, reads the others', and raises. After that the ranks are out of step, and
what is issued over the same axis raises the same error.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from threading import Thread, get_ident, main_thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals.process_groups import job_store, timeout_of
from .at_exit import leave, watch
from .lost_ranks import POLL, window_of
from .shared_memory import SharedMemory

SMALL_MESSAGE = 1 << 14  # bytes of a message that is short for two ranks; for many ranks less
ALL_ENVELOPES = 1 << 15  # bytes of what one rank sends at most, while there are few ranks
HEAD = 16  # bytes before a short message: the digest, and a place in shared memory
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


class Call:
    """One collective under way: what its Work waits for."""

    def __init__(self, line: Line, number: int, text: str) -> None:
        self.text, self.number, self.works, self.verified = text, number, list[Any](), False
        self.digest = line.digest(text)
        self.memory: SharedMemory | None = None
        self._line = line
        self._work: Any = None
        self._arrived: Any = None
        self._buffers: tuple[Tensor, ...] = ()

    @property
    def tag(self) -> int:
        """What no other collective that is under way has."""
        return 1 << 30 | (self.digest ^ self.number) & 0x3FFFFFFF

    def begin(self) -> None:
        """Before anything of it is sent or received."""
        self._line.begin(self)

    def post(self, message: Tensor | None = None, slot: int = -1) -> None:
        """Send the envelopes: with ``message``, one row of bytes for every rank or one for all, or with a place."""
        self._buffers = sent, got = self._line.take()
        sent[:, :HEAD].view(torch.int64).copy_(torch.tensor([self.digest, slot]))
        if message is not None:
            sent[:, HEAD : HEAD + message.shape[-1]] = message
        self.begin()
        self._work = self._line.exchange(sent, got)
        self._arrived = self._work.get_future()
        self._line.sent(self)

    def wait(self) -> None:
        self._line.verify(self)
        while self.works:  # who is interrupted by a signal has waited for those that are not there any more
            self.works.pop(0).wait()

    def arrive(self) -> Sequence[int]:
        """The digests of all ranks, or nothing if the call was closed meanwhile."""
        buffers = self._buffers
        self._work.wait()
        return _heads(buffers)[0] if buffers else ()

    def has_arrived(self) -> bool:
        """Whether the envelopes of all ranks are there.

        It asks the future, which takes no lock. ``is_completed`` of the Work waits, with Python's lock, for a lock that
        gloo's thread holds while a profiler's record ends, and to free saved-tensor hooks that thread needs Python's.
        """
        return self._arrived.done()

    def slots(self) -> Sequence[int]:
        """Where each rank's message is."""
        return _heads(self._buffers)[1]

    def rows(self, nbytes: int, dtype: torch.dtype) -> Tensor:
        """The short messages of all ranks: one row each, to be read before the call is closed."""
        return self._buffers[1][:, HEAD : HEAD + nbytes].view(dtype)

    def abandon(self) -> None:
        """Nobody waits for it: the line closes it when all ranks have sent theirs. Note [Abandoned] in work.py."""
        self._line.abandoned.append(self)

    def close(self) -> None:
        """The message is not read any more, here or in shared memory."""
        if self.verified and self._buffers:
            if self.memory:
                self.memory.done(self.slots())
            self._line.give_back(self._buffers)
            self._buffers = ()


def _heads(buffers: tuple[Tensor, ...]) -> list[list[int]]:
    """The digests, and the places in shared memory, of all ranks."""
    return buffers[1][:, :HEAD].view(torch.int64).T.tolist()


class Line:
    """The collectives of one rank over one process group, in their order."""

    def __init__(self, group: Any, size: int) -> None:
        self.capacity = max(min(ALL_ENVELOPES // size, SMALL_MESSAGE), 512) // 16 * 16  # bytes of a short message
        self.group, self._size, self._process = group, size, os.getpid()
        self._number, self._sending = 0, 0  # of the last one that was sent, and of one that is being sent
        self.abandoned: deque[Call] = deque()
        self._unverified: deque[Call] = deque()
        self._history: deque[str] = deque(maxlen=HISTORY)
        self._error = ""
        self._digests: dict[str, int] = {}  # of all that was sent so far: the same few again and again
        with torch.inference_mode(False):
            self._free = [self._new() for _ in range(4)]
        watch(self)

    def digest(self, text: str) -> int:
        if text not in self._digests:
            self._digests[text] = _digest(text)
        return self._digests[text]

    def open(self, text: str) -> Call:
        """The next collective; ``text`` is the same on all ranks, or this or a later call raises."""
        if self._sending:
            self._error = self._error or INTERRUPTED
        while (first := self._first()) and first.has_arrived():
            self.verify(first)
        self._refuse()
        self._close_abandoned()
        return Call(self, self._number + 1, text if get_ident() == main_thread().ident else text + OTHER_THREAD)

    def begin(self, call: Call) -> None:
        if call.number != self._number + 1 or self._sending not in (0, call.number):
            self._error = self._error or INTERRUPTED
        self._refuse()
        self._sending = call.number

    def exchange(self, sent: Tensor, got: Tensor) -> Any:
        return dist.all_to_all_single(got, sent, group=self.group, async_op=True)

    def sent(self, call: Call) -> None:
        self._unverified.append(call)
        self._number, self._sending = call.number, 0

    def verify(self, call: Call) -> None:
        """Raise unless this collective, and each one before it, is the same on all ranks."""
        while not call.verified:
            self._refuse()
            first = self._first() or call
            digests = first.arrive()
            same = len(set(digests)) == 1
            if first.verified:  # meanwhile
                continue
            if same:
                first.verified = True  # no call before popleft: other threads run at calls
                self._unverified.popleft()
                self._history.append(first.text)
            else:
                self._error = self._explained(first, digests)

    def _close_abandoned(self) -> None:
        """Those that all ranks have begun, so that what is still to be sent needs none of them."""
        for _ in range(len(self.abandoned)):
            with suppress(IndexError, RuntimeError):  # another thread may take it; what failed is over too
                call = self.abandoned.popleft()
                if call.verified:
                    call.wait()
                    call.close()
                else:
                    self.abandoned.append(call)

    def under_way(self) -> tuple[Callable[[], bool], Sequence[Any]]:
        calls = [*self._unverified]
        unwanted = dict.fromkeys([*self.abandoned, *calls])
        return lambda: all(call.has_arrived() for call in calls), [work for call in unwanted for work in call.works]

    def __del__(self) -> None:
        """What is still to be sent and received is kept until then, by a thread: Note [Abandoned] in work.py."""
        leave(self.group, [work for call in self.abandoned for work in call.works], self._process)

    def _first(self) -> Call | None:
        """The first call that is not verified; another thread may verify it at any time."""
        with suppress(IndexError):
            return self._unverified[0]
        return None

    def take(self) -> tuple[Tensor, ...]:
        """Envelopes to send and to receive; the same ones again and again."""
        if self._free:
            return self._free.pop()
        with torch.inference_mode(False):
            return self._new()

    def give_back(self, buffers: tuple[Tensor, ...]) -> None:
        self._free.append(buffers)

    def _new(self) -> tuple[Tensor, ...]:
        sent = torch.zeros((self._size, HEAD + self.capacity), dtype=torch.uint8)
        return sent, torch.empty_like(sent)

    def _refuse(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(FORKED)
        if self._error:
            raise RuntimeError(self._error)

    def _explained(self, call: Call, digests: Sequence[int]) -> str:
        ranks = dist.get_process_group_ranks(self.group)
        texts = _texts_of_all(self.group, call.number, call.text)
        same = [rank for rank, digest in zip(ranks, digests, strict=True) if digest == call.digest]
        lines = [f"  rank {rank}: {call.text if rank in same else texts.get(rank, 'another one')}" for rank in ranks]
        past = ["Before that, the same on all ranks:", *(f"  {text}" for text in self._history)]
        title = f"ranks {', '.join(map(str, ranks))} issue different collectives, each as its number {call.number}:"
        return "\n".join([title, *lines, *(past if self._history else []), ADVICE])


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _texts_of_all(group: Any, number: int, text: str) -> dict[int, str]:
    """``text`` of each rank of the group that writes it into the job's store within a while."""
    texts: dict[int, str] = {}
    window = window_of(timeout_of(group))
    key = f"functorch_shard/different/{group.group_name}/{number}"

    def exchange() -> None:
        with suppress(RuntimeError, ValueError):  # of the store, whose host may have exited
            store, end = job_store(), time.monotonic() + window
            store.set(f"{key}/{dist.get_rank()}", text)
            missing = set(dist.get_process_group_ranks(group))
            while missing and time.monotonic() < end:
                found = {rank for rank in missing if store.check([f"{key}/{rank}"])}
                texts.update((rank, store.get(f"{key}/{rank}").decode()) for rank in found)
                missing -= found
                time.sleep(POLL / 10)
            store.add(f"{key}/read", 1)
            while dist.get_rank() == 0 and time.monotonic() < end:  # it may keep the store
                if store.add(f"{key}/read", 0) == dist.get_process_group_ranks(group).__len__():
                    break
                time.sleep(POLL / 10)

    thread = Thread(target=exchange, name="functorch_shard different collectives", daemon=True)
    thread.start()
    thread.join(2 * window)  # a store whose host is stopped does not answer in time, or ever
    return dict(texts)
