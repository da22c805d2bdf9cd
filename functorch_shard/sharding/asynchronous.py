"""The asynchronous interpreter of a schedule: a collective is started now, the operations after it are done on wait.

The differentiable one is ``data_parallel``; both are folds over the same operations, Note [Schedule], so
their results are equal bitwise. Nothing here is seen by autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import RLock

import torch
from torch import Tensor

from ..communication.axis import Axis
from ..communication.backend import Finished, Work
from ..layout.buffers import Buffer, pack
from ..layout.layout import Layout
from ..layout.schedule import AllGather, AllReduce, Cast, Ops, up_to_communication
from ..mesh.mesh import Mesh
from ..storage.memory_kind import MemoryKind
from .data_parallel import no_communication, run
from .reduction import complete
from .streams import Streams


def start_gather(ops: Ops, shard: Tensor, key: str, mesh: Mesh, device: torch.device) -> Work:
    """The whole buffer ``key`` on ``device``; dims before the last are batch dims."""
    front, op, behind = up_to_communication(ops)
    dtypes = [one.dtype for one in front if isinstance(one, Cast)]
    if not isinstance(op, AllGather):
        return Finished(_copied(shard, dtypes[-1], device))
    if op.codec is None:
        return _start_all_gather(mesh[op.axis], shard, dtypes[-1], key, device)
    message, form = op.codec.encode(shard.to(device, non_blocking=True))
    codec, sizes = op.codec, (mesh[op.axis].size, message.shape[-1])

    def decoded(messages: Tensor) -> Tensor:
        rows = codec.decode(messages.unflatten(-1, sizes), form)
        return run(behind, rows.flatten(-2), no_communication)

    return _start_all_gather(mesh[op.axis], message, message.dtype, key, device).then(decoded)


def start_reduction(ops: Ops, packed: Tensor, key: str, mesh: Mesh) -> Work:
    """What ``ops`` make of the full gradient of buffer ``key``; ``packed`` is overwritten, and read until the wait."""

    def all_reduce(op: AllReduce, x: Tensor) -> Tensor:
        return mesh[op.axis].issue("psum", x, key=key).wait()

    front, op, behind = up_to_communication(ops)
    if op is None or isinstance(op, AllReduce):  # of copies alone: they wait for each other at the end
        return Work(lambda: run(ops, packed, all_reduce, Tensor.div_))
    work = mesh[op.axis].issue("psum_scatter", run(front, packed, no_communication, Tensor.div_), key=key)
    return work.then(lambda total: run(behind, total, all_reduce, Tensor.div_))


class Reductions:
    """The reductions of backward passes, started as gradients come and waited for at the end of each pass.

    One part is reduced at a time: the next waits for it, and so one full gradient is freed before another is packed,
    in the same memory. A pass that runs inside another (a hook, a reentrant checkpoint) has its own results.
    A result is put in the memory kind of its shard as soon as it is complete; ``wait`` waits for copies to pinned
    memory, which ``streams`` has a stream for. Autograd may call from several threads: a call that comes while another
    one waits for a message waits for it too.
    """

    def __init__(self, memory_kinds: Mapping[str, MemoryKind] | None = None, streams: Streams | None = None) -> None:
        self._memory_kinds, self._streams = memory_kinds or {}, streams
        self._one_at_a_time = RLock()
        self._started: list[tuple[int, str, Work]] = []
        self._results: dict[tuple[int, str], Work] = {}
        self._scratch: dict[int, Tensor] = {}

    def start(
        self,
        grads: Mapping[str, Tensor | None],
        buffers: Sequence[Buffer],
        layout: Layout,
        backward_pass: int,
        averages: bool = True,
    ) -> None:
        """Of the mean over ranks, or else of the sum over the ranks that share a buffer."""
        with self._one_at_a_time:
            self._finish()
            for i, buffer in enumerate(buffers):
                work = self._start(complete(grads, buffer, layout), buffer, layout, i, averages)
                self._started.append((backward_pass, buffer.key, work))

    def wait(self, key: str, backward_pass: int) -> Tensor | None:
        """The shard of buffer ``key`` that ``backward_pass`` has reduced, once."""
        with self._one_at_a_time:
            self._finish()
            result = self._results.pop((backward_pass, key), None)
            return None if result is None else result.wait()

    def _finish(self) -> None:
        while self._started:
            backward_pass, key, work = self._started.pop(0)
            total = work.wait()
            self._results[backward_pass, key] = self._put(key, total)

    def _put(self, key: str, total: Tensor) -> Work:
        kind = self._memory_kinds.get(key, MemoryKind(total.device))
        if kind.pinned and self._streams and not total.is_cpu:
            return self._streams.start_copy(total, kind.new(total))
        return Finished(kind.put(total))

    def _start(self, grads: Mapping[str, Tensor], buffer: Buffer, layout: Layout, place: int, averages: bool) -> Work:
        like = grads[buffer.slots[0].name]
        schedule = layout.schedules[buffer.key, like.dtype]
        ops = (*schedule.within, *schedule.across, Cast(schedule.dtypes.stored)) if averages else schedule.within
        # where there is nothing to add up now, what is packed may be the result, and is in new memory
        sharded = buffer.num_shards > 1 and like.layout is torch.strided  # pack refuses others
        scratch = self._scratch_for(buffer, like, schedule.dtypes.reduced, place) if sharded else None
        return start_reduction(ops, pack(grads, buffer, out=scratch), buffer.key, layout.mesh)

    def _scratch_for(self, buffer: Buffer, like: Tensor, dtype: torch.dtype, place: int) -> Tensor:
        """Memory that is written again and again: fresh pages cost as much as what is written to them."""
        scratch = self._scratch.get(place)
        if scratch is None or scratch.dtype != dtype or scratch.numel() < buffer.numel:
            scratch = self._scratch[place] = like.new_empty(buffer.numel, dtype=dtype)
        return scratch[: buffer.numel]


def _start_all_gather(axis: Axis, x: Tensor, dtype: torch.dtype, key: str, device: torch.device) -> Work:
    """In ``dtype``, cast on the way; ranks are laid side by side in the last dim."""
    if x.ndim > 1:
        rows = _copied(x, dtype, device)
        return Work(lambda: axis.issue("all_gather", rows, key=key, dim=rows.ndim - 1).wait().contiguous())
    return axis.issue("all_gather", x, dtype=dtype, key=key, device=device, transient=True)


def _copied(x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As it is now, row-major in memory of its own: a shard may be a view, and may be written to meanwhile."""
    return x.new_empty(x.shape, dtype=dtype, device=device).copy_(x, non_blocking=True)
