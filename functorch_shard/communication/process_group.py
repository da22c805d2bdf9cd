"""Real ranks over a ``torch.distributed`` process group: with the package ``gloo``, all that calls its collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import string_at
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .backend import Backend, Finished, Work, wait_for_all
from .collective import Collective, record

# 2.13 renamed them, and the old names warn there; 2.11 has only the old ones.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What gloo can send; other dtypes (float8, unsigned 16 to 64 bits, complex) are sent as their bytes.
_SENDABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_SENDABLE |= {torch.int64, torch.int32, torch.int8, torch.uint8}


@dataclass(frozen=True)
class GroupBackend(Backend):
    """Real ranks, over a ``torch.distributed`` process group."""

    group: Any = field(repr=False)
    rank: int
    size: int

    def index(self) -> int:
        return self.rank

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        move = getattr(self, f"_{op.kind}", None)
        if move is None:
            return self._send_parts(op, x.to(op.dtype))
        if op.dim:
            return move(op, x.movedim(op.dim, 0)).then(lambda result: result.movedim(0, op.dim))
        return move(op, x)

    # The collectives of torch, each with its ranks in dim 0.

    def _all_gather(self, op: Collective, x: Tensor) -> Work:
        number, *rest = x.shape
        out = torch.empty((self.size * number, *rest), dtype=op.dtype, device=op.device or x.device)
        own = out.narrow(0, self.rank * number, number)
        own.copy_(x, non_blocking=True)  # cast and laid in place by one copy, and sent from there
        return self._move(out, _gather_into, as_sendable(out), as_sendable(own))

    _exchange = _all_gather

    def _psum_scatter(self, op: Collective, x: Tensor) -> Work:
        rows = x.resolve_conj().contiguous()
        out = rows.new_empty((rows.shape[0] // self.size, *rows.shape[1:]))
        both = (torch.view_as_real(out), torch.view_as_real(rows)) if x.is_complex() else (out, rows)
        return self._move(out, _scatter_into, *both)

    def _psum(self, op: Collective, x: Tensor) -> Work:
        return self._all_reduce(x.resolve_conj(), dist.ReduceOp.SUM)

    def _pmax(self, op: Collective, x: Tensor) -> Work:
        if not x.is_floating_point():
            return self._all_reduce(x, dist.ReduceOp.MAX)
        wide, where = x if x.dtype in _SENDABLE else x.float(), x.isnan()  # a NaN is lost where libraries compare
        nan = self._all_reduce(where.to(torch.uint8), dist.ReduceOp.MAX)
        largest = self._all_reduce(wide.masked_fill(where, -torch.inf), dist.ReduceOp.MAX)
        return largest.then(lambda most: most.masked_fill(nan.wait().bool(), torch.nan).to(x.dtype))

    def _broadcast(self, op: Collective, x: Tensor) -> Work:
        out = x.clone(memory_format=torch.contiguous_format)
        return self._move(out, dist.broadcast, as_sendable(out), group_src=op.source)

    def _all_reduce(self, x: Tensor, op: Any) -> Work:
        out = x.clone(memory_format=torch.contiguous_format)
        return self._move(out, dist.all_reduce, out, op)

    def _move(self, out: Tensor, call: Callable[..., Any], *args: Any, **options: Any) -> Work:
        """Start a collective of torch that writes to ``out``; one without elements sends nothing."""
        if not out.numel():
            return Finished(out)
        return _sent(lambda: out, call(*args, group=self.group, async_op=True, **options), out)

    def _send_parts(self, op: Collective, x: Tensor) -> Work:
        """Any kind that torch has no collective for, by its law."""
        law, size = op.law, self.size
        parts = law.parts(op, x, self.rank, size, 0) if law.parts else x.expand(size, *x.shape)
        shapes = [parts[0].shape] * size
        if shape := law.shape:
            shapes = [torch.Size(shape(op, x.shape, rank, self.rank)) for rank in range(size)]
        sent = torch.cat([part.flatten() for part in parts])
        sizes, sent_sizes = [shape.numel() for shape in shapes], [part.numel() for part in parts]
        received = sent.new_empty(sum(sizes))

        def finish() -> Tensor:
            rows = [row.view(shape) for row, shape in zip(received.split(sizes), shapes, strict=True)]
            return law.combine(op, rows, 0)

        args = as_sendable(received), as_sendable(sent), sizes, sent_sizes
        return _sent(finish, dist.all_to_all_single(*args, group=self.group, async_op=True), received)


def _sent(finish: Callable[[], Tensor], handle: Any, out: Tensor) -> Work:
    """A collective that was sent on the current stream, whose allocator has its memory.

    Without a result waited for, that stream waits, whichever one is current where the work is dropped.
    """
    if out.device.type in ("cpu", "meta"):
        return Work(finish, [handle])
    stream: Any = torch.accelerator.current_stream(out.device)

    def abandon() -> None:
        with stream:
            wait_for_all([handle])

    return Work(finish, [handle], abandon)


def exchange(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], dtype: torch.dtype) -> None:
    """Messages of ``dtype`` between processes, by their ranks in the default group; received in place.

    All are posted before one is waited for, so their order cannot make two processes wait for each other.
    """
    record(Collective("send", "mesh", sum(x.numel() for x in sends.values()), dtype))
    messages = [dist.P2POp(dist.irecv, as_sendable(x), process) for process, x in receives.items()]
    messages += [dist.P2POp(dist.isend, as_sendable(x), process) for process, x in sends.items()]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def connect(num_processes: int, device: torch.device) -> None:
    """Before an :func:`exchange`: NCCL wants all ranks of a group there when it sends its first batch of messages."""
    if num_processes == dist.get_world_size():
        record(Collective("psum", "mesh", 1, torch.float32))
        dist.all_reduce(torch.zeros(1, device=device))


def in_memory(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of ``x`` in ``dtype``, as plain bytes in a row."""
    plain = x.detach().to(dtype).resolve_conj().resolve_neg().contiguous()
    return plain if type(plain) is Tensor else plain.clone()


def as_bytes(x: Tensor) -> bytes:
    """The memory of ``x``, which is contiguous and on the CPU."""
    return string_at(x.data_ptr(), x.nbytes)


def as_sendable(x: Tensor) -> Tensor:
    """``x`` in a dtype that a library can send: its bytes, unless it can send its own."""
    return x if x.dtype in _SENDABLE else x.unsqueeze(-1).view(torch.uint8)
