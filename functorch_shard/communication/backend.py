"""How bytes move: this file and ``gloo`` are the only ones that call ``torch.distributed`` collectives.

A backend is one axis of a mesh at work. Real ranks pass this rank's tensor and get this rank's result. Simulated ranks
pass the values of all ranks, stacked in dim 0, and get back either one value for all (``all_gather``, ``psum``,
``pmax``) or a stack of one value a rank (``psum_scatter``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from ctypes import string_at
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals.process_groups import timeout_of
from ..torch_internals.transforms import being_traced
from .dtypes import as_ordered, as_real, as_wire, from_ordered, from_real
from .writes import Gathered

# A marker in the dispatcher for every collective, on real and on simulated ranks: profiles show it by name, and
# testing.count_collectives sees it in any thread and below any transform, without state of ours.
_LIBRARY = torch.library.Library("functorch_shard", "FRAGMENT")
_LIBRARY.define("collective(str kind, str axis, int numel, int itemsize) -> ()")
_LIBRARY.impl("collective", lambda kind, axis, numel, itemsize: None, "CompositeExplicitAutograd")

# 2.13 renamed them, and the old names warn there; 2.11 has only the old ones.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Backend(ABC):
    """What the collectives ask of the ranks of one axis. ``dim`` is where ranks are laid side by side.

    A class that inherits from this writes the abstract ones; the others have defaults. See ``communication``.
    """

    @property
    def simulated(self) -> bool:
        """Whether operands are the values of all ranks, stacked."""
        return False

    @abstractmethod
    def index(self) -> Tensor | int: ...
    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor: ...
    @abstractmethod
    def psum_scatter(self, x: Tensor, dim: int) -> Tensor: ...
    @abstractmethod
    def psum(self, x: Tensor) -> Tensor: ...
    @abstractmethod
    def pmax(self, x: Tensor) -> Tensor: ...

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        """Row r of ``dim`` goes to rank r; what comes from rank r is row r."""
        if self.simulated:
            return x.movedim(dim + 1, 0).movedim(1, dim + 1)  # (from, .., to, ..) -> (to, .., from, ..)
        return self.all_gather(x.unsqueeze(0), 0).select(dim + 1, int(self.index())).movedim(0, dim)

    def others(self) -> Tensor | None:
        """Simulated ranks: a tensor that is batched at the levels of the mesh's other axes."""
        return None

    def ready(self) -> None:  # noqa: B027  (real ranks are)
        """Raise unless the ranks are there."""

    def start_all_gather(
        self, x: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Flight:
        """``all_gather`` along dim 0 in ``dtype`` and on ``device``, under way."""
        out = self.all_gather(x.to(device or x.device, dtype or x.dtype), 0)
        return Flight([], lambda: out)

    def start_psum_scatter(self, x: Tensor) -> Flight:
        """``psum_scatter`` along dim 0, under way; ``x`` is not written to until it has landed."""
        out = self.psum_scatter(x, 0)
        return Flight([], lambda: out)

    def scatter(self, out: Tensor, rows: Tensor | None, source: int) -> None:
        """Row r of what rank ``source`` has into ``out`` of rank r; the other ranks have no ``rows``."""
        raise NotImplementedError(f"{type(self).__name__} sends no values of one rank: write its scatter.")

    def broadcast(self, x: Tensor, source: int) -> None:
        """The ``x`` of rank ``source`` into that of every rank."""
        raise NotImplementedError(f"{type(self).__name__} sends no values of one rank: write its broadcast.")

    def exchange(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, as ``all_gather``: what ranks tell each other about their program."""
        return self.all_gather(rows, 0)

    def announce(self, kind: str, numel: int, dtype: torch.dtype, key: str = "") -> None:  # noqa: B027  (nobody listens)
        """Told before each collective: its operand on one rank, and the buffer it is for, where that is known."""

    @property
    def carrier(self) -> Backend:
        """What moves the bytes in the end: this backend, unless it stands before another."""
        return self


def record(kind: str, axis: str, numel: int, dtype: torch.dtype) -> None:
    """Mark a collective whose operand on each rank has ``numel`` elements of ``dtype``."""
    torch.ops.functorch_shard.collective(kind, axis, numel, dtype.itemsize)


class Flight:
    """A collective under way: ``land`` waits for it and gives its result, once.

    On CUDA waiting orders the current stream behind the collective and does not stop the host.
    """

    __slots__ = ("_decline", "_finish", "_works")

    def __init__(
        self, works: Sequence[Any], finish: Callable[[], Tensor], decline: Callable[[], None] = lambda: None
    ) -> None:
        self._works = list(works)
        self._finish: Callable[[], Tensor] | None = finish
        self._decline = decline

    def land(self) -> Tensor:
        works, finish = self._works, self._finish
        assert finish is not None, "a flight lands once"
        self._works, self._finish = [], None  # what was sent is let go with the closure
        for work in works:
            work.wait()
        return finish()

    def __del__(self) -> None:
        # Nobody wants the result (a part of the model was skipped, or an error was thrown): other ranks still send it,
        # and its memory must outlive that.
        works = getattr(self, "_works", ())  # a compiler that traces may make one without __init__
        for work in works:
            with suppress(RuntimeError):
                work.wait()
        if works:
            self._decline()


@dataclass(frozen=True)
class GroupBackend(Backend):
    """Real ranks, over a ``torch.distributed`` process group."""

    group: Any = field(repr=False)
    rank: int
    size: int

    def index(self) -> int:
        return self.rank

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self.start_all_gather(x.movedim(dim, 0)).land().movedim(0, dim)

    def psum_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.start_psum_scatter(x.movedim(dim, 0)).land().movedim(0, dim)

    def psum(self, x: Tensor) -> Tensor:
        return from_real(self._all_reduce(as_real(x), dist.ReduceOp.SUM), x.dtype)

    def pmax(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return self._all_reduce(x, dist.ReduceOp.MAX)
        return from_ordered(self._all_reduce(as_ordered(x), dist.ReduceOp.MAX), x.dtype)

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        refuse_tracing()
        sent = x.movedim(dim, 0).contiguous()
        received = torch.empty_like(sent)
        if sent.numel():
            dist.all_to_all_single(as_wire(received), as_wire(sent), group=self.group)
        return received.movedim(0, dim)

    def start_all_gather(
        self, x: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Flight:
        """The rows of all ranks, one after the other in dim 0, cast to ``dtype`` and on ``device`` on the way out."""
        refuse_tracing()
        out = torch.empty((self.size, *x.shape), dtype=dtype or x.dtype, device=device or x.device)
        out[self.rank].copy_(x, non_blocking=True)  # cast and laid in place by one copy, and sent from there
        works = self._gather_rows(as_wire(out)) if out.numel() else []
        return Flight(works, lambda: out.flatten(0, 1))

    def start_psum_scatter(self, x: Tensor) -> Flight:
        """The sum over ranks, of which this rank keeps its part of dim 0; ``x`` is not to be written to until then."""
        refuse_tracing()
        rows = as_real(x.contiguous())
        out = rows.new_empty((rows.shape[0] // self.size, *rows.shape[1:]))
        works = [_scatter_into(out, rows, group=self.group, async_op=True)] if out.numel() else []
        return Flight(works, lambda: from_real(out, x.dtype))

    def scatter(self, out: Tensor, rows: Tensor | None, source: int) -> None:
        refuse_tracing()
        if out.numel():
            parts = [] if rows is None else list(as_wire(rows).unbind(0))
            dist.scatter(as_wire(out), parts, group=self.group, group_src=source)

    def broadcast(self, x: Tensor, source: int) -> None:
        refuse_tracing()
        if x.numel():
            dist.broadcast(as_wire(x), group=self.group, group_src=source)

    def _all_reduce(self, x: Tensor, op: Any) -> Tensor:
        refuse_tracing()
        out = x.clone(memory_format=torch.contiguous_format)
        if out.numel():
            dist.all_reduce(out, op, group=self.group)
        return out

    def _gather_rows(self, rows: Tensor) -> list[Any]:
        """Row r of ``rows`` is rank r's; this rank's is there already."""
        return [_gather_into(rows.flatten(0, 1), rows[self.rank], group=self.group, async_op=True)]


def in_rank_order(rows: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """The sum from the first to the last, rounded after each addend; ``into`` may be one of the first two."""
    if len(rows) == 1:
        return rows[0].clone()
    total = torch.add(rows[0], rows[1]) if into is None else torch.add(rows[0], rows[1], out=into)
    for row in rows[2:]:
        total = total + row if into is None else total.add_(row)  # a zero tangent is not to be written to
    return total


def refuse_tracing() -> None:
    if being_traced():
        raise NotImplementedError(
            "make_fx, and so torch.func.linearize, cannot record a collective of real ranks: what it returned would be "
            "what it saw once. Use torch.func.jvp, which gathers the tangents of each call."
        )


def exchange(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], dtype: torch.dtype) -> None:
    """Messages of ``dtype`` between processes, by their ranks in the default group; received in place.

    All are posted before one is waited for, so their order cannot make two processes wait for each other.
    """
    record("exchange", "mesh", sum(x.numel() for x in sends.values()), dtype)
    messages = [dist.P2POp(dist.irecv, as_wire(x), process) for process, x in receives.items()]
    messages += [dist.P2POp(dist.isend, as_wire(x), process) for process, x in sends.items()]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def connect(num_processes: int, device: torch.device) -> None:
    """Before an :func:`exchange`: NCCL wants all ranks of a group there when it sends its first batch of messages."""
    if num_processes == dist.get_world_size():
        record("psum", "mesh", 1, torch.float32)
        dist.all_reduce(torch.zeros(1, device=device))


@dataclass(frozen=True)
class StackedBackend(Backend):
    """Simulated ranks: values of all ranks in dim 0, as the vmap rules of ``collectives`` see them."""

    size: int
    ranks: ContextVar[Tensor | None] = field(repr=False)
    gathered: ContextVar[Gathered | None] = field(repr=False)  # of all axes, while spmd runs
    siblings: tuple[ContextVar[Tensor | None], ...] = field(default=(), repr=False)
    simulated: bool = field(default=True, init=False)

    def index(self) -> Tensor:
        index = self.ranks.get()
        if index is None:
            raise RuntimeError(
                f"simulated ranks of axis {self.ranks.name!r} only exist inside mesh.spmd: decorate the function that "
                "communicates with @mesh.spmd, or wrap it, mesh.spmd(fn)(*args)."
            )
        return index

    def others(self) -> Tensor | None:
        indices = [index for index in (ranks.get() for ranks in self.siblings) if index is not None]
        return sum(indices[1:], indices[0]) if indices else None

    def ready(self) -> None:
        self.index()

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(x.unbind(0), dim)  # a copy, as on real ranks: a view would let the result write to the operand

    def psum_scatter(self, x: Tensor, dim: int) -> Tensor:
        total = in_rank_order(x.unbind(0))
        return total.unflatten(dim, (self.size, total.shape[dim] // self.size)).movedim(dim, 0)  # (N, .., n, ..)

    def psum(self, x: Tensor) -> Tensor:
        return in_rank_order(x.unbind(0))

    def pmax(self, x: Tensor) -> Tensor:
        return x.amax(0)


@dataclass(frozen=True)
class DetachedBackend(Backend):
    """No ranks at hand: one rank alone (nobody asks it), or a mesh that came out of a pickle."""

    rank: int = 0

    def index(self) -> int:
        return self.rank

    def ready(self) -> None:
        self._refuse()

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self._refuse()

    def psum_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._refuse()

    def psum(self, x: Tensor) -> Tensor:
        self._refuse()

    def pmax(self, x: Tensor) -> Tensor:
        self._refuse()

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "this mesh was unpickled and its ranks are not here. Put the tree on a live mesh of the same sizes: "
            "tree.on(mesh)."
        )


def in_memory(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of ``x`` in ``dtype``, as plain bytes in a row."""
    plain = x.detach().to(dtype).resolve_conj().resolve_neg().contiguous()
    return plain if type(plain) is Tensor else plain.clone()


def as_bytes(x: Tensor) -> bytes:
    """The memory of ``x``, which is contiguous and on the CPU."""
    return string_at(x.data_ptr(), x.nbytes)


class RollCall:
    """Short messages between the ranks of a group: on the host, beside whatever is under way in the group itself.

    Every rank of the group makes one at the same time. It waits as long as the group does.
    """

    def __init__(self, group: Any) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.timeout: timedelta = timeout_of(group)
        self._group = dist.new_group(self.ranks, self.timeout, "gloo", use_local_synchronization=True)

    def exchange(self, message: bytes) -> tuple[dict[int, bytes], RuntimeError | None]:
        """The messages by rank, as long as this one, of those who came; why not all did. None is all zeros."""
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8).repeat(len(self.ranks), 1)
        got, error = torch.zeros_like(sent), None
        try:
            dist.all_to_all_single(got, sent, group=self._group)  # each directly from its sender
        except RuntimeError as caught:
            error = caught
        rows = [as_bytes(row) for row in got]
        return {rank: row for rank, row in zip(self.ranks, rows, strict=True) if any(row)}, error
