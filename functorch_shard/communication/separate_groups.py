"""Reductions over a process group of their own, so that they and the gathers need not wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from ..torch_internals.process_groups import timeout_of
from .axis import Axis
from .backend import Backend
from .collective import Collective
from .process_group import GroupBackend
from .work import Work
from .wrapper import Issue, Wrapped, with_transport

_OF_GRADIENTS = ("psum_scatter", "all_to_all")  # plain and encoded


def separate_reductions(axis: Axis) -> Backend:
    """Reduce and scatter gradients over a process group of their own: ``mesh.with_backend(separate_reductions)``.

    NCCL runs the collectives of one process group one after the other, so in backward a gather waits for the reduction
    that was started before it. Over two groups they run at the same time, if the network can do both. Values are the
    same, bitwise.

    Args:
        axis: as ``mesh.with_backend`` passes it: ``mesh.with_backend(fs.communication.separate_reductions)``.

    Returns:
        A backend with the ranks, the timeout and the wraps of ``axis.backend``. On simulated ranks, one rank, and
        backends of your own it is ``axis.backend``.

    Cost:
        One more process group for each axis of real ranks, made by its ranks together: memory of a second communicator
        on NCCL, and its start. No more messages.

    Example:
        >>> mesh = fs.simulated_mesh(2).with_backend(fs.communication.separate_reductions)
        >>> rows = torch.tensor([[1, 2], [30, 40]])   # row r = rank r
        >>> mesh.spmd(lambda x: fs.collectives.psum_scatter(x, mesh))(rows)
        tensor([[31],
                [42]])

    Stands for FSDP2's ``set_separate_reduce_scatter_group``.
    """
    return with_transport(axis.backend, _with_two_groups)


def _with_two_groups(backend: Backend) -> Backend:
    if not isinstance(backend, GroupBackend) or backend.size == 1:
        return backend
    ranks, timeout = dist.get_process_group_ranks(backend.group), timeout_of(backend.group)
    group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    reductions = replace(backend, group=group)

    def issue(op: Collective, x: Tensor, send: Issue) -> Work:
        return reductions.issue(op, x) if op.kind in _OF_GRADIENTS else send(op, x)

    return _Separate(backend, issue, reductions)


@dataclass(frozen=True)
class _Separate(Wrapped):
    reductions: GroupBackend
