"""How bytes move: the only file that calls ``torch.distributed`` collectives.

A backend is one axis of a mesh at work. Real ranks pass this rank's tensor and get this rank's result. Simulated ranks
pass the values of all ranks, stacked in dim 0, and get back either one value for all (``all_gather``, ``psum``,
``pmax``) or a stack of one value a rank (``psum_scatter``).
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# A marker in the dispatcher for every collective, on real and on simulated ranks: profiles show it by name, and
# testing.count_collectives sees it in any thread and below any transform, without state of ours.
_LIBRARY = torch.library.Library("functorch_shard", "FRAGMENT")
_LIBRARY.define("collective(str kind, str axis, int numel, int itemsize) -> ()")
_LIBRARY.impl("collective", lambda kind, axis, numel, itemsize: None, "CompositeExplicitAutograd")

# 2.13 renamed them, and the old names warn there; 2.11 has only the old ones.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What gloo can send; other dtypes (float8, unsigned 16 to 64 bits, complex) travel as their bytes.
_WIRE = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}


class Backend(Protocol):
    """What the collectives ask of the ranks of one axis. ``dim`` is where ranks are laid side by side."""

    @property
    def simulated(self) -> bool: ...
    def index(self) -> Tensor | int: ...
    def others(self) -> Tensor | None: ...
    def all_gather(self, x: Tensor, dim: int) -> Tensor: ...
    def psum_scatter(self, x: Tensor, dim: int) -> Tensor: ...
    def psum(self, x: Tensor) -> Tensor: ...
    def pmax(self, x: Tensor) -> Tensor: ...


def record(kind: str, axis: str, x: Tensor, num_values: int = 1) -> None:
    """Mark a collective whose operand is ``x`` on each rank; ``num_values`` ranks are stacked in ``x``."""
    torch.ops.functorch_shard.collective(kind, axis, x.numel() // max(num_values, 1), x.element_size())


@dataclass(frozen=True)
class GroupBackend:
    """Real ranks, over a ``torch.distributed`` process group."""

    group: Any = field(repr=False)
    rank: int
    size: int
    simulated: bool = field(default=False, init=False)

    def index(self) -> int:
        return self.rank

    def others(self) -> None:
        return None

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if not x.numel():
            return torch.cat([x] * self.size, dim)
        rows = _as_wire(x.movedim(dim, 0).contiguous())
        out = rows.new_empty((self.size * rows.shape[0], *rows.shape[1:]))
        _gather_into(out, rows, group=self.group)
        return _from_wire(out, x.dtype).movedim(0, dim)

    def psum_scatter(self, x: Tensor, dim: int) -> Tensor:
        rows = _as_real(x.movedim(dim, 0).contiguous())
        out = rows.new_empty((rows.shape[0] // self.size, *rows.shape[1:]))
        if out.numel():
            _scatter_into(out, rows, group=self.group)
        return _from_real(out, x.dtype).movedim(0, dim)

    def psum(self, x: Tensor) -> Tensor:
        return _from_real(self._all_reduce(_as_real(x), dist.ReduceOp.SUM), x.dtype)

    def pmax(self, x: Tensor) -> Tensor:
        return self._all_reduce(x, dist.ReduceOp.MAX)

    def _all_reduce(self, x: Tensor, op: Any) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        if out.numel():
            dist.all_reduce(out, op, group=self.group)
        return out


@dataclass(frozen=True)
class GlooBackend(GroupBackend):
    """Gloo ranks: reductions by messages between pairs, added up in rank order, whatever the timing of the ranks.

    From 1.0 to 9.7 times as fast as gloo's own reduce-scatter, the more the smaller the buffers and the more ranks;
    all-gathers showed no such difference (python -m tests.benchmarks.gloo).
    """

    def psum_scatter(self, x: Tensor, dim: int) -> Tensor:
        parts = x.movedim(dim, 0).unflatten(0, (self.size, x.shape[dim] // self.size)).contiguous()
        first, *others = _from_wire(self._exchange(_as_wire(parts)), x.dtype)
        for row in others:
            first += row
        return first.movedim(0, dim)

    def _exchange(self, rows: Tensor) -> Tensor:
        """Row i goes to rank i; row i of the result comes from rank i."""
        got = torch.empty_like(rows, memory_format=torch.contiguous_format)
        if not rows.numel():
            return got
        got[self.rank] = rows[self.rank]
        peers = [(self.rank + i) % self.size for i in range(1, self.size)]  # nobody is everybody's first
        sends = [dist.P2POp(dist.isend, rows[i], group=self.group, group_peer=i) for i in peers]
        receives = [dist.P2POp(dist.irecv, got[i], group=self.group, group_peer=i) for i in peers]
        for work in dist.batch_isend_irecv([*sends, *receives]):
            work.wait()
        return got


def group_backend(group: Any, rank: int, size: int) -> GroupBackend:
    """The fastest way to move bytes in ``group``."""
    kind = GlooBackend if dist.get_backend(group) == "gloo" else GroupBackend
    return kind(group, rank, size)


@dataclass(frozen=True)
class StackedBackend:
    """Simulated ranks: values of all ranks in dim 0, as the vmap rules of ``collectives`` see them."""

    size: int
    ranks: ContextVar[Tensor | None] = field(repr=False)
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
        """A tensor that is batched at the levels of the mesh's other axes."""
        indices = [index for index in (ranks.get() for ranks in self.siblings) if index is not None]
        return sum(indices[1:], indices[0]) if indices else None

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(x.unbind(0), dim)  # a copy, as on real ranks: a view would let the result write to the operand

    def psum_scatter(self, x: Tensor, dim: int) -> Tensor:
        total = x.sum(0, dtype=x.dtype)
        return total.unflatten(dim, (self.size, total.shape[dim] // self.size)).movedim(dim, 0)  # (N, .., n, ..)

    def psum(self, x: Tensor) -> Tensor:
        return x.sum(0, dtype=x.dtype)

    def pmax(self, x: Tensor) -> Tensor:
        return x.amax(0)


@dataclass(frozen=True)
class DetachedBackend:
    """No ranks at hand: one rank alone (nobody asks it), or a mesh that came out of a pickle."""

    rank: int = 0
    simulated: bool = field(default=False, init=False)

    def index(self) -> int:
        return self.rank

    def others(self) -> None:
        return None

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self._refuse()

    def psum_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._refuse()

    def psum(self, x: Tensor) -> Tensor:
        self._refuse()

    def pmax(self, x: Tensor) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "this mesh was unpickled and its ranks are not here. Put the tree on a live mesh of the same sizes: "
            "Sharded(tree, tree.layout.on(mesh))."
        )


def _as_wire(x: Tensor) -> Tensor:
    return x if x.dtype in _WIRE else x.unsqueeze(-1).view(torch.uint8)


def _from_wire(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.view(dtype).squeeze(-1)


def _as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _from_real(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(x) if dtype.is_complex else x
