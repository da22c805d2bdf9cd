"""Real ranks over gloo: each message carries a description of its collective, and results are those of its law.

A message is sent in one of three ways, by its size alone: in the envelope that every collective begins with (Note
[Envelopes] in guard.py); above that, through shared memory on one host (Note [Regions] in shared_memory.py), and over
sockets between hosts. On each way :class:`Kind` combines what arrived, as on simulated ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..communication.backend import Work
from ..communication.collective import Collective
from ..communication.process_group import GroupBackend, as_bytes, in_memory
from .guard import Guard
from .shared_memory import SharedMemory, open_shared_memory

# Up to so many bytes, a psum is one round: all ranks send all of it. Two ranks have nothing to save by two rounds.
SMALL_SUM = 1 << 16


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
        """Opened by the first large message, which comes at the same place in the program on every rank."""
        return open_shared_memory(self.rank, self.size, self._exchange_bytes)

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        if op.law.parts:
            return self._swap(op, x, op.device or x.device)
        if op.law.reduces and self.size > 2 and x.nbytes > SMALL_SUM:
            return self._reduce_in_two_rounds(op, x)
        return self._share(op, x, op.device or x.device)

    def _reduce_in_two_rounds(self, op: Collective, x: Tensor) -> Work:
        """Each rank combines its part of all operands, and sends it to the others."""
        flat = pad(x.detach().flatten(), (0, -x.numel() % self.size)).unflatten(0, (self.size, -1))
        second = replace(op, kind="all_gather", key=f"{op.key} in two rounds")

        def whole(part: Tensor) -> Tensor:
            return self._share(second, part, x.device).wait()[: x.numel()].view(x.shape)

        return self._swap(op, flat, x.device, flat).then(whole)

    def _share(self, op: Collective, x: Tensor, device: torch.device) -> Work:
        """Send the whole of ``x`` to all ranks."""
        shape, nbytes, combine = (self.size, *x.shape), x.numel() * op.dtype.itemsize, op.law.combine
        x, is_short = x.detach().cpu(), nbytes <= self._guard.capacity
        memory = None if is_short else self._memory  # it may have to be opened, which is a collective
        call, keeps = self._guard.call(op, x.numel()), False
        if is_short:
            call.post(x.reshape(1, -1).to(op.dtype))
            read = lambda: call.rows(nbytes, op.dtype).view(shape)  # noqa: E731
        elif memory:
            call.region = memory.take(call.number, self.size * nbytes)
            call.region.write(in_memory(x, op.dtype), self.rank * nbytes)
            call.post()
            read, keeps = lambda: call.memory().view(op.dtype).view(shape), op.transient
        else:
            rows = torch.empty(shape, dtype=op.dtype, device="cpu")
            rows[self.rank].copy_(x)
            call.post(None, dict.fromkeys(self._peers, rows[self.rank]), {rank: rows[rank] for rank in self._peers})
            read, keeps = lambda: rows, True
        keeps = keeps and not op.law.reduces and not op.dim  # side by side as they are

        def finish() -> Tensor:
            rows = read()
            return (rows.flatten(0, 1) if keeps else combine(op, rows.unbind(0), 0)).to(device)

        call.finish = finish
        return call

    def _swap(self, op: Collective, x: Tensor, device: torch.device, equal: Tensor | None = None) -> Work:
        """Send a part of ``x`` to each rank: by the law of ``op``, or the rows of ``equal``."""
        x, me, dtype, law = x.detach().cpu().to(op.dtype), self.rank, op.dtype, op.law
        parts, shapes = self.parts_of(op, x) if equal is None else (equal.cpu(), [equal[0].shape] * self.size)
        if law.shape:
            numels = [[prod(law.shape(op, x.shape, i, j)) for j in range(self.size)] for i in range(self.size)]
        else:
            numels = [[parts[0].numel()] * self.size] * self.size
        sizes = [[numel * dtype.itemsize for numel in row] for row in numels]  # bytes from i to j
        largest = max(map(max, sizes))
        is_short = largest <= self._guard.capacity
        memory = None if is_short or self.size == 1 else self._memory
        call = self._guard.call(op, op.numel if law.shape else x.numel())
        if is_short:
            rows = parts.reshape(self.size, -1) if isinstance(parts, Tensor) else _padded(parts, max(map(max, numels)))
            call.post(rows)

            def read() -> Sequence[Tensor]:
                rows = call.rows(largest, dtype)
                return [rows[i, : shape.numel()].view(shape) for i, shape in enumerate(shapes)]

        else:
            is_one = isinstance(parts, Tensor)
            parts = in_memory(parts, dtype).unbind(0) if is_one else [in_memory(part, dtype) for part in parts]
            got = [parts[me] if i == me else torch.empty(0, dtype=dtype) for i in range(self.size)]
            starts = _starts(sizes)
            if memory:
                call.region, end = memory.take(call.number, starts[-1]), starts[me]
                for part in (*parts[:me], *parts[me + 1 :]):
                    end = call.region.write(part, end)
                call.post()
            else:
                for rank in self._peers:
                    got[rank] = torch.empty(shapes[rank], dtype=dtype, device="cpu")
                call.post(None, {rank: parts[rank] for rank in self._peers}, {rank: got[rank] for rank in self._peers})

            def read() -> Sequence[Tensor]:
                if call.region:
                    all_bytes = call.memory()
                    for rank in self._peers:
                        start = starts[rank] + sum(sizes[rank][:me]) - (sizes[rank][rank] if rank < me else 0)
                        got[rank] = all_bytes[start : start + sizes[rank][me]].view(dtype).view(shapes[rank])
                return got

        call.finish = lambda: law.combine(op, read(), 0).to(device)
        return call

    @property
    def _peers(self) -> list[int]:
        """The other ranks, nearest first, so that they do not all send to the same one first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _exchange_bytes(self, message: bytes) -> list[bytes]:
        op = Collective("exchange", "", len(message), torch.uint8, "shared memory")
        rows = self.issue(op, torch.frombuffer(bytearray(message), dtype=torch.uint8)[None]).wait()
        return [as_bytes(row) for row in rows]


def _padded(parts: Sequence[Tensor], numel: int) -> Tensor:
    """Rows of ``numel``: each of ``parts``, and then zeros."""
    return torch.stack([pad(part.reshape(-1), (0, numel - part.numel())) for part in parts])


def _starts(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Where in shared memory the message of each rank starts, which has no part for itself, and where the last ends."""
    return [0, *accumulate(sum(row) - row[rank] for rank, row in enumerate(sizes))]
