"""``torch.distributed`` inside of simulated ranks: its default process group has their number, and refuses collectives.

Without it a program that asks ``torch.distributed.is_initialized()`` would take itself for the only process. On ranks
that run one after the other ``get_rank()`` is the rank; inside of a vmap over all ranks it is 0, since torch's own
loggers ask for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NoReturn

import torch.distributed as dist

from .simulated import rank_of_thread

_NAME = "simulated"
_ONE_AT_A_TIME = Lock()  # threads of the program may run simulated ranks at once, and share a group


@contextmanager
def default_group(size: int) -> Iterator[None]:
    """A context in which ``torch.distributed`` speaks of ``size`` simulated ranks, unless the process has a group."""
    if not dist.is_available():
        yield
        return
    with _ONE_AT_A_TIME:
        if not dist.is_initialized():
            if _NAME not in dist.Backend.backend_list:
                dist.Backend.register_backend(_NAME, _made, devices=["cpu"])
            hook = sys.excepthook  # init_process_group sets another one
            dist.init_process_group(_NAME, store=dist.HashStore(), rank=0, world_size=size)
            sys.excepthook = hook
        group = dist.group.WORLD if isinstance(dist.group.WORLD, _Group) else None
        if group is not None:
            group.users += 1
    try:
        yield
    finally:
        with _ONE_AT_A_TIME:
            if group is not None:
                group.users -= 1
                if not group.users:
                    dist.destroy_process_group()


def _made(store: Any, rank: int, size: int, timeout: Any) -> Any:
    make: Any = _Group
    return make(rank, size)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "torch.distributed inside of mesh.spmd: simulated ranks have no collectives of torch. Use "
        "functorch_shard.collectives and axis_index(mesh), which real ranks have too."
    )


class _Group(dist.ProcessGroup):
    """All simulated ranks; of what is not here torch says "No backend type associated with device type"."""

    users = 0

    def rank(self) -> int:
        return rank_of_thread() or 0

    allreduce = broadcast = allgather = alltoall = alltoall_base = barrier = send = recv = reduce = gather = _refuse
    scatter = reduce_scatter = _allgather_base = _reduce_scatter_base = _refuse
    all_gather_single = reduce_scatter_single = _refuse  # the names of torch 2.13
