"""Real ranks over gloo: each message carries a description of its collective, and sums are in rank order.

A message is sent in one of three ways, by its size alone: in the envelope that every collective begins with (Note
[Envelopes] in guard.py); above that, through shared memory on one host (Note [Regions] in shared_memory.py), and over
sockets between hosts. Sums are those of ``sum_in_rank_order`` on each way, as on simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..communication.backend import Finished, Work
from ..communication.collective import Collective
from ..communication.lost_ranks import run_on_group
from ..communication.process_group import GroupBackend, as_bytes, as_ordered, from_ordered, in_memory
from ..communication.simulated import sum_in_rank_order
from .guard import Guard
from .shared_memory import SharedMemory, open_shared_memory

# Up to so many bytes, a psum is one round: all ranks send all of it. Two ranks have nothing to save by two rounds.
SMALL_SUM = 1 << 16
_DENSE = torch.contiguous_format


@dataclass(frozen=True)
class GlooBackend(GroupBackend):
    """Gloo ranks: a collective is one round of messages, and every rank knows that it is the same one on all of them.

    Operands on another device than the CPU go through it.
    """

    @cached_property
    def _guard(self) -> Guard:
        return Guard(self.group, self.size)

    @cached_property
    def _memory(self) -> SharedMemory | None:
        """Opened by the first large message, which comes at the same place in the program on every rank."""
        return open_shared_memory(self.rank, self.size, self._exchange)

    def all_gather(self, op: Collective, x: Tensor) -> Work:
        return self._share(op, x, None, op.dtype)

    def psum_scatter(self, op: Collective, x: Tensor) -> Work:
        return self._sum(op, x.unflatten(0, (self.size, x.shape[0] // self.size)))

    def psum(self, op: Collective, x: Tensor) -> Work:
        if self.size == 2 or x.nbytes <= SMALL_SUM:
            return self._share(op, x, _sum_of_rows, x.dtype)
        flat = pad(x.detach().flatten(), (0, -x.numel() % self.size))
        second = replace(op, kind="psum, second half")

        def whole(part: Tensor) -> Tensor:
            return self._share(second, part, None, x.dtype).wait()[: x.numel()].view(x.shape)

        return self._sum(op, flat.unflatten(0, (self.size, -1))).then(whole)

    def pmax(self, op: Collective, x: Tensor) -> Work:
        if not x.is_floating_point():
            return self._share(op, x, lambda rows: rows.amax(0), x.dtype)
        order = as_ordered(x)
        return self._share(op, order, lambda rows: from_ordered(rows.amax(0), x.dtype), order.dtype)

    def all_to_all(self, op: Collective, x: Tensor) -> Work:
        return self._swap(op, x.detach().cpu(), lambda got, _: torch.stack([*got]), x.device)

    def ragged_all_to_all(self, op: Collective, x: Tensor) -> Work:
        parts = self.parts_of(op, x.detach().cpu())
        return self._swap(op, parts, lambda got, _: torch.cat([*got], -1), x.device)

    def scatter(self, op: Collective, x: Tensor) -> Work:
        """By messages of its own: torch's copies all rows first."""
        call, device = self._guard.call(op, op.numel), op.device or x.device
        if self.rank == op.source:
            out = x[self.rank].detach().to("cpu", op.dtype, copy=True, memory_format=_DENSE)
            call.post(None, {rank: in_memory(x[rank].cpu(), op.dtype) for rank in self._peers}, {})
        else:
            out = torch.empty(x.shape[1:], dtype=op.dtype, device="cpu")
            call.post(None, {}, {op.source: out})
        call.finish = lambda: out.to(device)
        return call

    def broadcast(self, op: Collective, x: Tensor) -> Work:
        """By gloo, at once: all ranks have to be at it first."""
        self._guard.compare(op, x.numel())
        move = super().broadcast
        return Finished(run_on_group(f"{op} on axis {op.axis!r}", self.group, lambda: move(op, x).wait()))

    def _share(self, op: Collective, x: Tensor, then: Callable[[Tensor], Tensor] | None, dtype: torch.dtype) -> Work:
        """``then`` of the ``x`` of all ranks, stacked and cast to ``dtype``; without it, these side by side."""
        device, shape, nbytes = op.device or x.device, (self.size, *x.shape), x.numel() * dtype.itemsize
        x, is_short = x.detach().cpu(), nbytes <= self._guard.capacity
        memory = None if is_short else self._memory  # it may have to be opened, which is a collective
        call, lasts = self._guard.call(op, x.numel()), True
        if is_short:
            call.post(x.reshape(1, -1).to(dtype))
            read, lasts = lambda: call.rows(nbytes, dtype).view(shape), False
        elif memory:
            call.region = memory.take(call.number, self.size * nbytes)
            call.region.write(in_memory(x, dtype), self.rank * nbytes)
            call.post()
            read, lasts = lambda: call.memory().view(dtype).view(shape), op.transient
        else:
            rows = torch.empty(shape, dtype=dtype, device="cpu")
            rows[self.rank].copy_(x)
            call.post(None, dict.fromkeys(self._peers, rows[self.rank]), {rank: rows[rank] for rank in self._peers})
            read = lambda: rows  # noqa: E731

        def finish() -> Tensor:
            rows = read()
            result = then(rows) if then else (rows if lasts else rows.clone(memory_format=_DENSE)).flatten(0, 1)
            return result.to(device)

        call.finish = finish
        return call

    def _sum(self, op: Collective, parts: Tensor) -> Work:
        """The sum over ranks of this rank's part; ``parts`` has one for each rank."""

        def total(rows: Sequence[Tensor], lasts: bool) -> Tensor:
            return sum_in_rank_order(
                rows, rows[0 if self.rank else self.size > 1] if lasts else torch.empty_like(rows[0])
            )

        return self._swap(op, parts.detach().cpu(), total, op.device or parts.device)

    def _swap(
        self,
        op: Collective,
        parts: Tensor | Sequence[Tensor],
        then: Callable[[Sequence[Tensor], bool], Tensor],
        device: torch.device,
    ) -> Work:
        """``then`` of what the ranks have for this one, and of whether the others' is memory of its own.

        ``parts[r]`` is for rank r, on the CPU: rows of one tensor on every rank, or as large as ``op.splits`` says.
        """
        me, own = self.rank, parts[self.rank]
        dtype, one = own.dtype, (own.shape[:-1].numel() if op.splits else own.numel()) * own.element_size()
        sizes = [[n * one for n in row] for row in op.splits or ((1,) * self.size,) * self.size]  # bytes from i to j
        shapes = self.shapes_of(op, own) if op.splits else [own.shape] * self.size
        largest = max(map(max, sizes))
        is_short, lasts = largest <= self._guard.capacity, False
        memory = None if is_short or self.size == 1 else self._memory
        call = self._guard.call(op, parts.numel() if isinstance(parts, Tensor) else op.numel)
        if is_short:
            call.post(
                parts.reshape(self.size, -1) if isinstance(parts, Tensor) else _padded(parts, largest // dtype.itemsize)
            )

            def read() -> Sequence[Tensor]:
                rows = call.rows(largest, dtype)
                if isinstance(parts, Tensor):
                    return rows.view(parts.shape).unbind(0)
                return [rows[i, : shape.numel()].view(shape) for i, shape in enumerate(shapes)]

            call.finish = lambda: then(read(), False).to(device)
            return call
        parts = in_memory(parts, dtype).unbind(0) if isinstance(parts, Tensor) else [in_memory(x, dtype) for x in parts]
        own = parts[me]
        if memory:
            starts = _starts(sizes)
            call.region, end = memory.take(call.number, starts[-1]), starts[me]
            for part in (*parts[:me], *parts[me + 1 :]):
                end = call.region.write(part, end)
            call.post()

            def read() -> Sequence[Tensor]:
                all_bytes, got = call.memory(), [own] * self.size
                for rank in self._peers:
                    start = starts[rank] + sum(sizes[rank][:me]) - (sizes[rank][rank] if rank < me else 0)
                    got[rank] = all_bytes[start : start + sizes[rank][me]].view(dtype).view(shapes[rank])
                return got
        else:
            got, lasts = [own if i == me else torch.empty(shape, dtype=dtype) for i, shape in enumerate(shapes)], True
            call.post(None, {rank: parts[rank] for rank in self._peers}, {rank: got[rank] for rank in self._peers})
            read = lambda: got  # noqa: E731
        call.finish = lambda: then(read(), lasts).to(device)
        return call

    @property
    def _peers(self) -> list[int]:
        """The other ranks, nearest first, so that they do not all send to the same one first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _exchange(self, message: bytes) -> list[bytes]:
        op = Collective("exchange", "", len(message), torch.uint8, "shared memory")
        rows = self.all_gather(op, torch.frombuffer(bytearray(message), dtype=torch.uint8)[None]).wait()
        return [as_bytes(row) for row in rows]


def _sum_of_rows(rows: Tensor) -> Tensor:
    return sum_in_rank_order(rows.unbind(0))


def _padded(parts: Sequence[Tensor], numel: int) -> Tensor:
    """Rows of ``numel``: each of ``parts``, and then zeros."""
    return torch.stack([pad(part.reshape(-1), (0, numel - part.numel())) for part in parts])


def _starts(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Where in shared memory the message of each rank starts, which has no part for itself, and where the last ends."""
    return [0, *accumulate(sum(row) - row[rank] for rank, row in enumerate(sizes))]
