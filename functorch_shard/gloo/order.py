"""The guard of gloo ranks for ranks of other libraries: before each collective they compare what they issue."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ..communication.backend import Axis, Issue, Work, wrap
from ..communication.collective import Collective
from ..communication.process_group import GroupBackend
from ..torch_internals.tensors import timeout_of
from .backend import GlooBackend, Guard


def check_order(axis: Axis) -> Axis:
    """Before each collective over ``axis``, make sure that all of its ranks are about to issue the same one.

    For :meth:`Mesh.with_backend`, over NCCL, where ranks that issue different collectives hang: ``mesh =
    fs.init_mesh().with_backend(functorch_shard.gloo.check_order)`` on every rank. Gloo ranks compare every collective
    anyway. Nothing that is computed changes.

    Args:
        axis: the axis to check, as ``with_backend`` passes it.

    Returns:
        The same ranks, whose collectives raise before they are issued if they differ. Of gloo ranks, simulated ones and
        a single one: ``axis`` itself.

    Raises:
        TypeError: the bytes are moved by something other than a process group.
        RuntimeError: later, from a collective, on every rank: the ranks issue different ones, by number in order, kind,
            elements, dtype, buffer, dim, source or splits; the text has what each issued, and the last few before. Or a
            rank exited, or stalled for longer than the timeout of the process group; it is named.

    Cost:
        A gloo group on the host beside each axis, and before each collective one round of small messages, which all
        ranks wait for: about as long as a ``psum`` of a few numbers takes. For debugging.

    Example:
        >>> from functorch_shard.gloo import check_order
        >>> mesh = fs.simulated_mesh(2)
        >>> check_order(mesh["shard"]) is mesh["shard"]   # simulated ranks cannot differ
        True

    Stands for the execution order check of FSDP1 under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
    """
    backend = axis.backend
    if backend.simulated or axis.size == 1 or isinstance(backend, GlooBackend):
        return axis
    if not isinstance(backend, GroupBackend):
        raise TypeError(
            f"check_order: axis {axis.name!r}: got a {type(backend).__name__}, expected a process group to exchange "
            "messages beside. Take the mesh from init_mesh, and wrap its backends instead of replacing them."
        )
    ranks, timeout = dist.get_process_group_ranks(backend.group), timeout_of(backend.group)
    guard = Guard(dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True), axis.size, backend)

    def issue(op: Collective, x: Tensor, send: Issue) -> Work:
        call = guard.call(op, op.numel)
        call.post()
        call.wait()
        return send(op, x)

    return wrap(issue)(axis)
