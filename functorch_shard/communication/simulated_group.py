"""``torch.distributed`` inside of simulated ranks: for the duration of ``spmd`` its default process group is theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals.process_groups import finished_work

Issue = Callable[[str, Tensor], Tensor]  # the result of a collective of this kind, along dim 0, over all ranks
_NAME = "simulated"
_BATCHED = (
    "torch.distributed inside of mesh.spmd: simulated ranks of kind 'batched' are rows of tensors, of which it knows "
    "nothing. Use functorch_shard.collectives and axis_index(mesh), or simulated_mesh(..., kind='sequential')."
)


@contextmanager
def default_group(size: int, rank: Callable[[], int] | None = None, issue: Issue | None = None) -> Iterator[None]:
    """A context in which simulated ranks are torch's default process group, unless the process has one already.

    Without ``rank`` and ``issue`` it has a size, collectives raise, and the rank is 0: torch's own loggers ask for it.
    """
    with _ONE_AT_A_TIME:
        group = _begun(size, rank or _zero, issue or _refuse)
    try:
        yield
    finally:
        with _ONE_AT_A_TIME:
            _ended(group)


_ONE_AT_A_TIME = Lock()  # threads may run simulated ranks at once: those of kind "batched" then share a group


def _begun(size: int, ask: Callable[[], int], issue: Issue) -> _Group | None:
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if _NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(_NAME, _made, devices=["cpu"])
        hook = sys.excepthook  # init_process_group sets another one
        dist.init_process_group(_NAME, store=dist.HashStore(), rank=0, world_size=size)
        sys.excepthook, group = hook, dist.group.WORLD
        assert isinstance(group, _Group)
        group.ask, group.issue, group.users = ask, issue, 1
        return group
    group = dist.group.WORLD
    if not isinstance(group, _Group) or not (group.issue is issue is _refuse):
        return None
    group.users += 1
    return group


def _ended(group: _Group | None) -> None:
    if group is not None:
        group.users -= 1
        if not group.users:
            group.ask = _zero
            dist.destroy_process_group()


def _made(store: Any, rank: int, size: int, timeout: Any) -> Any:
    make: Any = _Group
    group = make(rank, size)
    group.ask = _zero
    return group


def _zero() -> int:
    """Return the rank while torch sets up the group, and ends it."""
    return 0


def _refuse(*args: Any) -> NoReturn:
    raise NotImplementedError(_BATCHED)


class _Group(dist.ProcessGroup):
    """All simulated ranks; what it does not have raises torch's "No backend type associated with device type"."""

    ask: Callable[[], int]
    issue: Issue
    users: int

    def rank(self) -> int:
        return self.ask()

    def _do(self, kind: str, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.issue(kind, x)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        for x in tensors:
            if (op := opts.reduceOp) == dist.ReduceOp.MAX or op == dist.ReduceOp.MIN:
                sign = 1 if op == dist.ReduceOp.MAX else -1
                x.copy_(sign * self._do("pmax", sign * x))
            else:
                x.copy_(self._mean(self._do("psum", x), op))
        return finished_work()

    def _mean(self, total: Tensor, op: Any) -> Tensor:
        if not (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG):
            raise NotImplementedError("torch.distributed on simulated ranks has SUM, AVG, MAX and MIN")
        return total / self.size() if op == dist.ReduceOp.AVG else total

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        for x in tensors:
            x.copy_(self._do("all_gather", x[None])[opts.rootRank])
        return finished_work()

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for of_ranks, x in zip(outputs, inputs, strict=True):
            for out, value in zip(of_ranks, self._do("all_gather", x[None]), strict=True):
                out.copy_(value)
        return finished_work()

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for out, value in zip(outputs, self._do("all_to_all", torch.stack([*inputs])), strict=True):
            out.copy_(value)
        return finished_work()

    def _allgather_base(self, output: Tensor, x: Tensor, opts: Any = None) -> Any:
        output.copy_(self._do("all_gather", x[None]).view_as(output))
        return finished_work()

    def _reduce_scatter_base(self, output: Tensor, x: Tensor, opts: Any) -> Any:
        part = self._do("psum_scatter", x.view(self.size(), *output.shape))[0]
        output.copy_(self._mean(part, opts.reduceOp))
        return finished_work()

    # the names of torch 2.13
    all_gather_single = _allgather_base  # pyright: ignore[reportAssignmentType]
    reduce_scatter_single = _reduce_scatter_base  # pyright: ignore[reportAssignmentType]

    def barrier(self, opts: Any = None) -> Any:
        self._do("psum", torch.zeros(1))
        return finished_work()
