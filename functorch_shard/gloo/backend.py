"""Real ranks over gloo: they issue the same collectives, or all raise what differs, and results are those of a law.

Note [Envelopes]: gloo pairs what ranks send by a counter, the k-th collective of one with the k-th of every other.
Where these are different ones, numbers of one unit are taken for another's if the sizes agree; if they do not, gloo
aborts the process, or ranks wait for each other until the timeout. So each collective here begins with one envelope
from every rank to every other one, which have one size whatever is sent: k-th meets k-th, and no size can be wrong. An
envelope says what the collective is (its kind, elements, dtype, and the buffer it is for), with a digest of that, and
has the message itself, if it is short. A long message is in shared memory on one host (Note [Regions] in
shared_memory.py). Between hosts it is sent at the same time, under a tag that is drawn from the digest and the number
of the collective. ``wait()`` first compares the digests of this and all earlier collectives. All ranks have the same
envelopes, find the same first difference, and raise the same error; from then on they are out of step, and the axis
refuses every collective.

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
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from itertools import accumulate
from threading import get_ident, main_thread
from typing import Any, NoReturn
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.nn.functional import pad

from ..communication.backend import Work
from ..communication.collective import KINDS, Collective, Kind, describe
from ..communication.process_group import GroupBackend, as_bytes, in_memory
from ..torch_internals.tensors import timeout_of
from .lost_ranks import POLL, raise_named, window_of
from .shared_memory import Region, SharedMemory, open_shared_memory

SMALL_MESSAGE = 1 << 14  # bytes of a message that is short for two ranks; for many ranks less
ALL_ENVELOPES = 1 << 15  # bytes of what one rank sends at most, while there are few ranks
SMALL_SUM = 1 << 16  # bytes of a sum that is one round, in which all ranks send all of it; two ranks have no other
HEAD = 256  # bytes before a short message: the digest, and what the collective is
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

Ranks = Mapping[int, Tensor]


@dataclass(frozen=True)
class GlooBackend(GroupBackend):
    """Gloo ranks: a collective is one round of messages, and every rank knows that it is the same one on all of them.

    Operands on another device than the CPU go through it.
    """

    @cached_property
    def _guard(self) -> Guard:
        return Guard(self.group, self.size, self)

    @cached_property
    def _memory(self) -> SharedMemory | None:
        """Opened by the first long message, which comes at the same place in the program on every rank."""
        return open_shared_memory(self.rank, self.size, self._exchange_bytes)

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        law, device = op.law, op.device or x.device
        if law.parts or not law.reduces or self.size < 3 or x.nbytes <= SMALL_SUM:
            return self._send(op, law, x, device)
        # In two rounds: each rank combines its part of all operands, and sends it to the others.
        rows = pad(x.detach().flatten(), (0, -x.numel() % self.size)).unflatten(0, (self.size, -1))
        second = replace(op, kind="all_gather", key=f"{op.key} in two rounds")

        def whole(part: Tensor) -> Tensor:
            return self._send(second, KINDS["all_gather"], part, device).wait()[: x.numel()].view(x.shape)

        return self._send(op, replace(law, parts=lambda op, x, *_: x), rows, device).then(whole)

    def _send(self, op: Collective, law: Kind, x: Tensor, device: torch.device) -> Work:
        """Send each rank what ``law`` has for it, or ``x`` to all, and combine what arrives.

        A message goes one of three ways, by its size alone: in the envelope, through shared memory, or over sockets.
        """
        size, me, dtype, x = self.size, self.rank, op.dtype, x.detach().cpu().to(op.dtype)
        parts: Any = law.parts(op, x, me, size, 0) if law.parts else x[None]
        if law.shape:
            table = [[Size(law.shape(op, x.shape, i, j)) for j in range(size)] for i in range(size)]
            numels = [[shape.numel() for shape in row] for row in table]  # from i to j
            shapes = [row[me] for row in table]
        else:
            numels, shapes = [[parts[0].numel()] * len(parts)] * size, [parts[0].shape] * size
        column, longest = me if law.parts else 0, max(map(max, numels))
        keeps = not (law.parts or law.reduces or op.dim)  # side by side as they are
        stays = op.transient and keeps  # in shared memory
        is_short = longest * dtype.itemsize <= self._guard.capacity
        memory = None if is_short or size == 1 else self._memory  # it may have to be opened, which is a collective
        call = self._guard.call(op, op.numel if law.shape else x.numel())
        if is_short:
            if isinstance(parts, Tensor):
                message = parts.reshape(len(parts), -1)
            else:
                message = torch.stack([pad(part.reshape(-1), (0, longest - part.numel())) for part in parts])
            got = call.post(message)[:, HEAD : HEAD + longest * dtype.itemsize].view(dtype)
            read = lambda: [got[i, : shape.numel()].view(shape) for i, shape in enumerate(shapes)]  # noqa: E731
        elif memory:
            pairs = [(i, j) for i in range(size) for j in range(len(parts))]  # what is for oneself stays here
            lengths = [0 if law.parts and i == j else dtype.itemsize * numels[i][j] for i, j in pairs]
            starts = [0, *accumulate(lengths)]
            region = call.region = memory.take(call.number, max(starts[-1], 1))
            for j, part in enumerate(parts):
                if j != me or not law.parts:
                    region.write(in_memory(part, dtype), starts[me * len(parts) + j])
            call.post()

            def read() -> Tensor | list[Tensor]:
                all_bytes = region.read(keep=stays)
                if stays:
                    call.region = None  # which the result frees
                    return all_bytes.view(dtype).view(-1, *x.shape[1:])
                received = zip(starts[column :: len(parts)], lengths[column :: len(parts)], shapes, strict=False)
                return [
                    parts[me] if law.parts and i == me else all_bytes[start : start + n].view(dtype).view(shape)
                    for i, (start, n, shape) in enumerate(received)
                ]

        else:
            if law.parts:
                whole, sent = None, [in_memory(part, dtype) for part in parts]
                rows = [sent[i] if i == me else torch.empty(shapes[i], dtype=dtype, device="cpu") for i in range(size)]
            else:
                whole = torch.empty((size, *x.shape), dtype=dtype, device="cpu")
                whole[me].copy_(x)
                rows, sent = [*whole], [whole[me]] * size
            peers = [(me + i) % size for i in range(1, size)]  # nearest first, so that not all send to one first
            call.post(None, {rank: sent[rank] for rank in peers}, {rank: rows[rank] for rank in peers})
            read = lambda: whole.flatten(0, 1) if keeps and whole is not None else rows  # noqa: E731

        def finish() -> Tensor:
            rows = read()
            return (rows if isinstance(rows, Tensor) else law.combine(op, rows, 0)).to(device)

        return call.then(finish)

    def _exchange_bytes(self, message: bytes) -> list[bytes]:
        op = Collective("exchange", "", len(message), torch.uint8, "shared memory")
        rows = self.issue(op, torch.frombuffer(bytearray(message), dtype=torch.uint8)[None]).wait()
        return [as_bytes(row) for row in rows]


class Call:
    """One collective of gloo ranks, which its :class:`Work` waits for."""

    def __init__(self, guard: Guard, op: Collective, numel: int) -> None:
        self.buffers: Sequence[Tensor] = ()  # envelopes, sent and received, until they are read
        self.guard, self.op, self.number = guard, op, guard.number + 1
        self.digest, self.head = _described(op, numel, get_ident() == main_thread().ident)
        self.region: Region | None = None
        self.works: list[Any] = []  # messages over sockets
        self.work: Any = None
        self.arrived: Any = None  # a future: unlike is_completed of a work, it takes no lock that gloo's threads hold
        self.verified = False

    def post(self, rows: Tensor | None = None, sends: Ranks | None = None, receives: Ranks | None = None) -> Tensor:
        """Send the envelopes, and return those that are received.

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
                self.works = [dist.irecv(x, group_src=r, **options) for r, x in receives.items() if x.numel()]
                self.works += [dist.isend(x, group_dst=r, **options) for r, x in sends.items() if x.numel()]
            self.buffers = sent, got = guard.free.pop() if guard.free else guard.new_envelopes()
            sent[:, :HEAD] = self.head
            if rows is not None:
                sent[:, HEAD : HEAD + rows.shape[1] * rows.element_size()].view(rows.dtype).copy_(rows)
            self.work = guard.exchange(got, sent)
            self.arrived = self.work.get_future()
        except RuntimeError as error:
            self._raise_named(error)
        guard.unverified.append(self)
        guard.number, guard.is_sending = self.number, False
        return got

    def then(self, finish: Callable[[], Tensor]) -> Work:
        """Return what waits for this call, and has what ``finish`` makes of it.

        If nobody waits, the guard closes it once all ranks have sent. Note [Abandoned] in communication/backend.py.
        """

        def result() -> Tensor:
            made = finish()
            self.close()
            return made

        return Work(result, [self], lambda: self.guard.abandoned.append(self))

    def wait(self) -> None:
        """Wait until all ranks have sent the same collective, and its messages are there."""
        self.verify()
        try:
            while self.works:  # who is interrupted by a signal has waited for those that are not there any more
                self.works.pop(0).wait()
        except RuntimeError as error:
            self._raise_named(error)

    def verify(self) -> None:
        """Wait until all ranks have sent the same collective."""
        try:
            self.guard.verify(self)
        except RuntimeError as error:
            self._raise_named(error)

    def _raise_named(self, error: RuntimeError) -> NoReturn:
        raise_named(error, f"{self.op} on axis {self.op.axis!r}", self.guard.group)

    def close(self) -> None:
        """The messages are not read any more; other threads may say so too."""
        if self.region:
            self.region.free()
        if buffers := self.buffers:
            self.buffers = ()
            self.guard.free.append(buffers)


class Guard:
    """The collectives of one rank over one process group, in their order, for as long as ``owner`` issues them."""

    def __init__(self, group: Any, size: int, owner: object) -> None:
        self.capacity = max(min(ALL_ENVELOPES // size, SMALL_MESSAGE), 512) // 16 * 16  # bytes of a short message
        self.group, self._size, self._process = group, size, os.getpid()
        self.exchange = partial(dist.all_to_all_single, group=group, async_op=True)
        self.number, self.is_sending = 0, False  # of the last one that was sent
        self.error = ""
        self.unverified: deque[Call] = deque()  # in the order in which they were sent
        self.abandoned: deque[Call] = deque()  # whose result nobody waits for
        self.free = [self.new_envelopes() for _ in range(4)]  # to send and to receive; the same ones again and again
        atexit.register(self.end)  # which also keeps what is pending when its owner is freed
        finalize(owner, self._retire).atexit = False

    def call(self, op: Collective, numel: int) -> Call:
        """Return the next collective; what ``op`` is on ``numel`` elements is the same on all ranks, or it raises."""
        while (unverified := [*self.unverified]) and unverified[0].arrived.done():
            unverified[0].verify()
        self._refuse()
        for _ in range(len(self.abandoned)):
            with suppress(IndexError, RuntimeError):  # another thread may take it; what failed is over too
                abandoned = self.abandoned.popleft()
                if not abandoned.verified:
                    self.abandoned.append(abandoned)
                    continue
                while abandoned.works:  # all ranks have begun it, so what is still to be sent does not need its end
                    abandoned.works.pop(0).wait()
                abandoned.close()
        return Call(self, op, numel)

    def new_envelopes(self) -> Sequence[Tensor]:
        with torch.inference_mode(False):
            sent = torch.zeros((self._size, HEAD + self.capacity), dtype=torch.uint8, device="cpu")
            return sent, torch.empty_like(sent)

    def verify(self, call: Call) -> None:
        """Raise unless this collective, and each one before it, is the same on all ranks."""
        while not call.verified:
            self._refuse()
            first, *_ = *self.unverified, call
            buffers = first.buffers
            first.work.wait()
            digests = buffers[1][:, :8].view(torch.int64).flatten().tolist() if buffers else ()
            if first.verified:  # by another thread meanwhile, which may have closed it
                continue
            if len({*digests}) == 1:
                first.verified = True  # no call before popleft: other threads run at calls
                self.unverified.popleft()
            else:
                self.error = self._explained(first)

    def _refuse(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(FORKED)
        if self.error:
            raise RuntimeError(self.error)

    def _explained(self, call: Call) -> str:
        ranks = dist.get_process_group_ranks(self.group)
        texts = [bytes(row).decode(errors="ignore").rstrip("\0") for row in call.buffers[1][:, 8:HEAD].tolist()]
        lines = [f"  rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True)]
        title = f"ranks {', '.join(map(str, ranks))} issue different collectives, each as its number {call.number}:"
        return "\n".join([title, *lines, ADVICE])

    def _have_arrived(self) -> bool:
        return all(call.arrived.done() for call in [*self.unverified])

    def _messages(self) -> list[Any]:
        """Those over sockets whose result nobody wants, each with a ``wait``."""
        return [work for call in dict.fromkeys([*self.abandoned, *self.unverified]) for work in call.works]

    def _pending(self) -> bool:
        return bool(self._messages()) or not self._have_arrived()

    def _retire(self) -> None:
        if not self._pending():
            atexit.unregister(self.end)

    def end(self) -> None:
        """Finish or abandon what is pending when this process ends, within a bounded time: Note [Exit]."""
        if self._process != os.getpid() or not self._pending():
            return
        messages, end = self._messages(), time.monotonic() + window_of(timeout_of(self.group))
        if not _await(self._have_arrived, end):
            with suppress(RuntimeError):  # gloo ends connections where a wait has timed out: here for no message
                lost = self.group.recv([torch.empty(1)], (self.group.rank() + 1) % self.group.size(), _TAG)
                lost.wait(timedelta(milliseconds=1))
            _await(self._have_arrived, time.monotonic() + _MOMENT)
        for message in messages:
            with suppress(RuntimeError):
                message.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))


atexit.register(time.sleep, _PAUSE)  # after all guards: what is registered last is called first


@lru_cache(maxsize=4096)
def _described(op: Collective, numel: int, in_main_thread: bool) -> tuple[int, Tensor]:
    """A digest of what a collective is, and both as the head of an envelope."""
    text = describe(replace(op, numel=numel)) + ("" if in_main_thread else OTHER_THREAD)
    digest = blake2b(text.encode(), digest_size=8).digest()
    head = bytearray((digest + text.encode())[:HEAD].ljust(HEAD, b"\0"))
    with torch.inference_mode(False):
        return int.from_bytes(digest, "big", signed=True), torch.frombuffer(head, dtype=torch.uint8)


def _await(condition: Callable[[], bool], end: float) -> bool:
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(POLL / 100)
    return met
