"""Real ranks over gloo: each message carries a description of its collective, and sums are in rank order.

A message is sent in one of three ways, by its size alone: in the header that every collective begins with (Note
[Envelopes] in headers.py); over sockets; or, above ``SOCKET_LIMIT`` on one host, through shared memory. There the
result of an all-gather that is freed soon is one memory of all ranks (Note [Regions] in shared_results.py). Sums are
those of ``sum_in_rank_order`` on each way, as on simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..torch_internals.tensors import version_of
from .collective import Collective, describe
from .dtypes import as_ordered, from_ordered
from .headers import Call, Line
from .process_group import GroupBackend, as_bytes, in_memory
from .shared_memory import SharedMemory, open_shared_memory
from .simulated import sum_in_rank_order
from .work import Work

# Above so many bytes a rank, shared memory beats sockets. Two ranks (tests/benchmarks/gloo.py) gather 128 KB a rank in
# 0.6 ms through it and in 0.7 ms over sockets, 512 KB in 0.7 and 2.2 ms, 8 MB in 2.2 and 10.1 ms; they reduce 512 KB in
# 1.0 and 3.2 ms. A step of 200 small layers, 100 KB a message, takes 90 ms with it and 120 ms without.
SOCKET_LIMIT = 1 << 16
# Up to so many bytes, a psum is one round: all ranks send all of it. Two ranks have nothing to save by two rounds.
SMALL_SUM = 1 << 16
_DENSE = torch.contiguous_format


@dataclass(frozen=True)
class GlooBackend(GroupBackend):
    """Gloo ranks: a collective is one round of messages, and every rank knows that it is the same one on all of them.

    Operands on another device than the CPU go through it.
    """

    @cached_property
    def _line(self) -> Line:
        return Line(self.group, self.size)

    @cached_property
    def _memory(self) -> SharedMemory | None:
        """Opened by the first large message, which comes at the same place in the program on every rank."""
        return open_shared_memory(self.rank, self._exchange)

    def all_gather(self, op: Collective, x: Tensor) -> Work:
        return self._share(op, x, lambda rows: rows.flatten(0, 1), op.dtype)

    def psum_scatter(self, op: Collective, x: Tensor) -> Work:
        return self._sum(op, x.unflatten(0, (self.size, x.shape[0] // self.size)))

    def psum(self, op: Collective, x: Tensor) -> Work:
        if self.size == 2 or x.nbytes <= SMALL_SUM:
            return self._share(op, x, lambda rows: sum_in_rank_order(rows.unbind(0)))
        flat = pad(x.detach().flatten(), (0, -x.numel() % self.size))
        second = replace(op, kind="psum, second half")

        def whole(part: Tensor) -> Tensor:
            return self._share(second, part, lambda rows: rows.flatten()[: x.numel()].view(x.shape)).wait()

        return self._sum(op, flat.unflatten(0, (self.size, -1))).then(whole)

    def pmax(self, op: Collective, x: Tensor) -> Work:
        if not x.is_floating_point():
            return self._share(op, x, lambda rows: rows.amax(0))
        return self._share(op, as_ordered(x), lambda rows: from_ordered(rows.amax(0), x.dtype))

    def all_to_all(self, op: Collective, x: Tensor) -> Work:
        return self._swap(op, in_memory(x.cpu(), x.dtype), torch.stack, x.device)

    def ragged_all_to_all(self, op: Collective, x: Tensor) -> Work:
        """All ranks choose the same transport, from the size of the largest part, which each of them knows."""
        parts = [in_memory(part, x.dtype) for part in self.parts_of(op, x.cpu())]
        got = [torch.empty(shape, dtype=x.dtype) for shape in self.shapes_of(op, x)]
        got[self.rank] = parts[self.rank]
        largest = x.shape[:-1].numel() * max(map(max, op.splits)) * x.element_size()
        memory = self._memory_for(largest)
        call = self._call(op, op.numel)
        if largest <= self._line.capacity:
            read = self._parts_by_envelope(call, parts, got, largest)
        elif memory:
            read = self._parts_by_memory(call, memory, op, parts, got)
        else:
            self._swap_rows(
                call, {rank: parts[rank] for rank in self._peers}, {rank: got[rank] for rank in self._peers}
            )
            read = None

        def joined() -> Tensor:
            if read:
                read()
            return torch.cat(got, -1).to(x.device)

        return _work(call, joined)

    def _parts_by_envelope(
        self, call: Call, parts: Sequence[Tensor], got: Sequence[Tensor], largest: int
    ) -> Callable[[], None]:
        rows = torch.zeros(self.size, largest, dtype=torch.uint8)
        for row, part in zip(rows, parts, strict=True):
            if part.numel():
                row[: part.nbytes] = _as_bytes(part)[0]
        call.post(rows)

        def read() -> None:
            for rank in self._peers:
                if got[rank].numel():
                    _as_bytes(got[rank])[0].copy_(call.rows(got[rank].nbytes, torch.uint8)[rank])

        return read

    def _parts_by_memory(
        self, call: Call, memory: SharedMemory, op: Collective, parts: Sequence[Tensor], got: Sequence[Tensor]
    ) -> Callable[[], None]:
        call.memory = memory
        call.post(slot=memory.write([part for part in parts if part.numel()]))

        def read() -> None:
            for rank, slot in ((rank, call.slots()[rank]) for rank in self._peers if got[rank].numel()):
                before = sum(op.splits[rank][: self.rank]) * got[rank].shape[:-1].numel() * got[rank].element_size()
                memory.read(rank, slot, before, got[rank])

        return read

    def scatter(self, op: Collective, x: Tensor) -> Work:
        call, device = self._call(op, op.numel), op.device or x.device
        if self.rank == op.source:
            out = x[self.rank].clone(memory_format=_DENSE)
            call.works = self._send(call, {rank: in_memory(x[rank].cpu(), op.dtype) for rank in self._peers})
        else:
            out = torch.empty(x.shape[1:], dtype=op.dtype)
            call.works = self._receive(call, {op.source: out})
        call.post()
        return _work(call, lambda: out.to(device))

    def broadcast(self, op: Collective, x: Tensor) -> Work:
        call, broadcast = self._call(op, x.numel()), super().broadcast
        call.post()
        return _work(call, lambda: broadcast(op, x).wait())

    @property
    def _peers(self) -> list[int]:
        """The other ranks, nearest first, so that they do not all send to the same one first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _call(self, op: Collective, numel: int) -> Call:
        return self._line.open(describe(op if numel == op.numel else replace(op, numel=numel)))

    def _memory_for(self, nbytes: int) -> SharedMemory | None:
        return self._memory if nbytes > SOCKET_LIMIT else None

    def _share(
        self, op: Collective, x: Tensor, then: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> Work:
        """``then`` of the ``x`` of all ranks, stacked; each cast to ``dtype`` on the way out."""
        x, device, dtype = x.detach().cpu(), op.device or x.device, dtype or x.dtype
        nbytes = x.numel() * dtype.itemsize
        memory = None if nbytes <= self._line.capacity else self._memory_for(nbytes)
        call = self._call(op, x.numel())
        if nbytes <= self._line.capacity:
            read = self._by_envelope(call, x, dtype)
        else:
            by_memory = self._in_place if op.transient else self._by_memory
            read = by_memory(call, memory, x, dtype) if memory else self._by_sockets(call, x, dtype)
        return _work(call, lambda: then(read()).to(device))

    # Each sends ``x`` to all ranks, and returns what gives the values of all ranks, stacked.

    def _by_envelope(self, call: Call, x: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        call.post(_as_bytes(in_memory(x, dtype)))

        def read() -> Tensor:
            rows = call.rows(x.numel() * dtype.itemsize, dtype)
            return rows.clone(memory_format=_DENSE).view(self.size, *x.shape)

        return read

    def _by_sockets(self, call: Call, x: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        rows = torch.empty((self.size, *x.shape), dtype=dtype)
        rows[self.rank].copy_(x)
        self._swap_rows(call, dict.fromkeys(self._peers, rows[self.rank]), {rank: rows[rank] for rank in self._peers})
        return lambda: rows

    def _by_memory(self, call: Call, memory: SharedMemory, x: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        writes = None if x.is_inference() or type(x) is not Tensor else version_of(x)  # the version that was sent
        call.memory = memory
        call.post(slot=memory.write([in_memory(x, dtype)]))

        def read() -> Tensor:
            own = x if writes is not None and writes == version_of(x) else None
            return memory.read_rows(call.slots(), x.shape, dtype, own)

        return read

    def _in_place(self, call: Call, memory: SharedMemory, x: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        call.memory = memory
        slot = memory.write_in_place(call.number, x, dtype)
        call.post(slot=memory.write([in_memory(x, dtype)]) if slot is None else slot)

        def read() -> Tensor:
            call.memory = None  # the result lets go when it is freed
            rows = memory.rows_in_place(call.slots(), x.shape, dtype)
            if rows is None:
                call.memory = memory
                return memory.read_rows(call.slots(), x.shape, dtype, None)
            return rows

        return read

    def _sum(self, op: Collective, parts: Tensor) -> Work:
        """The sum over ranks of this rank's part; ``parts`` has one for each rank."""
        device, plain = op.device or parts.device, in_memory(parts.cpu(), parts.dtype)
        if memory := self._memory_for(plain[0].nbytes):
            call = self._call(op, plain.numel())
            call.memory = memory
            call.post(slot=memory.write([plain[: self.rank], plain[self.rank + 1 :]]))
            return _work(call, lambda: memory.read_sum(call.slots(), plain[self.rank]).to(device))
        sent = plain[0].nbytes > self._line.capacity  # then what is received is memory of its own
        into = 0 if self.rank else 1
        return self._swap(op, plain, lambda rows: sum_in_rank_order(rows, rows[into] if sent else None), device)

    def _swap(
        self, op: Collective, parts: Tensor, then: Callable[[list[Tensor]], Tensor], device: torch.device
    ) -> Work:
        """``then`` of what the ranks have for this one; row r of ``parts`` is for rank r."""
        call, nbytes = self._call(op, parts.numel()), parts[0].nbytes
        if nbytes <= self._line.capacity:
            call.post(_as_bytes(parts, self.size))
            return _work(call, lambda: then(list(call.rows(nbytes, parts.dtype).view(parts.shape))).to(device))
        got = [parts[rank] if rank == self.rank else torch.empty_like(parts[rank]) for rank in range(self.size)]
        self._swap_rows(call, {rank: parts[rank] for rank in self._peers}, {rank: got[rank] for rank in self._peers})
        return _work(call, lambda: then(got).to(device))

    def _swap_rows(self, call: Call, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        call.works = self._receive(call, receives) + self._send(call, sends)
        call.post()

    def _send(self, call: Call, rows: dict[int, Tensor]) -> list[Any]:
        call.begin()
        to = {"group": self.group, "tag": call.tag}
        return [dist.isend(_as_bytes(x), group_dst=rank, **to) for rank, x in rows.items() if x.numel()]

    def _receive(self, call: Call, rows: dict[int, Tensor]) -> list[Any]:
        call.begin()
        to = {"group": self.group, "tag": call.tag}
        return [dist.irecv(_as_bytes(x), group_src=rank, **to) for rank, x in rows.items() if x.numel()]

    def _exchange(self, message: bytes) -> list[bytes]:
        op = Collective("exchange", "", len(message), torch.uint8, "shared memory")
        rows = self.all_gather(op, torch.frombuffer(bytearray(message), dtype=torch.uint8)[None]).wait()
        return [as_bytes(row) for row in rows]


def _work(call: Call, finish: Callable[[], Tensor]) -> Work:
    def finished() -> Tensor:
        try:
            return finish()
        finally:
            call.close()

    return Work(finished, [call], call.abandon)


def _as_bytes(x: Tensor, num_rows: int = 1) -> Tensor:
    """The memory of ``x``, which is contiguous, as rows of bytes."""
    rows = x.reshape(num_rows, -1)
    if rows.stride(-1) != 1:  # a single number may have any stride
        rows = rows.as_strided(rows.shape, (rows.shape[-1], 1))
    return rows.view(torch.uint8)


def group_backend(group: Any, rank: int, size: int, device: torch.device) -> GroupBackend:
    """The fastest way to move bytes in ``group`` between tensors on ``device``."""
    config = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    kind = GlooBackend if config.get(device.type) == "gloo" else GroupBackend
    return kind(group, rank, size)
