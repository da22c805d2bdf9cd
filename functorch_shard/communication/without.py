"""Backends that leave out collectives, to see what they cost."""

from __future__ import annotations

import torch
from torch import Tensor

from .axis import Axis
from .backend import Backend
from .collective import Collective
from .work import Finished, Work
from .wrapper import Issue, Wrapped


def without_all_gather(axis: Axis) -> Backend:
    """Send no all-gather over ``axis``: results of the right shape and dtype whose numbers mean nothing.

    To see what gathering costs. Every rank's part is this rank's own, so that arithmetic on it takes as long as ever
    and indices stay valid. Results take memory as usual. What ``plan`` compares between ranks is still sent.

    Args:
        axis: as ``mesh.with_backend`` passes it: ``mesh.with_backend(fs.communication.without_all_gather)``.

    Returns:
        A backend that passes everything else on.

    Cost:
        No message; one copy of the result.

    Example:
        >>> mesh = fs.simulated_mesh(2).with_backend(fs.communication.without_all_gather)
        >>> rows = torch.tensor([[1, 2], [3, 4]])   # row r = rank r
        >>> mesh.spmd(lambda x: fs.collectives.all_gather(x, mesh), out_dims=None)(rows)
        tensor([1, 2, 1, 2])

    Stands for ``FSDP_USE_FAKE_ALL_GATHER``.
    """

    def issue(op: Collective, x: Tensor, send: Issue) -> Work:
        if op.kind != "all_gather":
            return send(op, x)
        own = x[0] if axis.backend.simulated else x
        return Finished(torch.cat([own.to(op.device or x.device, op.dtype)] * axis.size, op.dim))

    return Wrapped(axis.backend, issue)


def without_reduction(axis: Axis) -> Backend:
    """Send no reduction over ``axis``: results of the right shapes and dtypes, whose numbers mean nothing.

    That is ``psum_scatter``, ``psum``, ``pmax``, and the ``all_to_all`` of encoded gradients, to see what they cost.
    Every rank keeps what it had, as if it were alone. Results take memory as usual; what real ranks receive messages in
    does not.

    Args:
        axis: as ``mesh.with_backend`` passes it: ``mesh.with_backend(fs.communication.without_reduction)``.

    Returns:
        A backend that passes everything else on.

    Cost:
        No message; one copy of the result.

    Example:
        >>> mesh = fs.simulated_mesh(2).with_backend(fs.communication.without_reduction)
        >>> rows = torch.tensor([[1, 2], [30, 40]])   # row r = rank r
        >>> mesh.spmd(lambda x: fs.collectives.psum_scatter(x, mesh))(rows)
        tensor([[ 1],
                [40]])

    Stands for ``FSDP_USE_FAKE_REDUCE``.
    """

    def own_part(x: Tensor, dim: int, rank: int) -> Tensor:
        return x.unflatten(dim, (axis.size, x.shape[dim] // axis.size)).select(dim, rank)

    def issue(op: Collective, x: Tensor, send: Issue) -> Work:
        simulated = axis.backend.simulated
        match op.kind:
            case "psum_scatter" if simulated:
                return Finished(torch.stack([own_part(row, op.dim, rank) for rank, row in enumerate(x.unbind(0))]))
            case "psum_scatter":
                return Finished(own_part(x, op.dim, int(axis.backend.index())).clone())
            case "psum" | "pmax":
                return Finished((x[0] if simulated else x).clone())
            case "all_to_all":
                return Finished(x.clone())
        return send(op, x)

    return Wrapped(axis.backend, issue)
