"""A backend that leaves out collectives, to see what they cost, or that a test notices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import reject
from .axis import Axis, wrap
from .backend import Backend, Finished, Issue, Work
from .collective import Collective

_KINDS = ("all_gather", "psum_scatter", "psum", "pmax", "all_to_all")


def skip(*kinds: str) -> Callable[[Axis], Backend]:
    """Send no collective of these kinds: results have the right shapes and dtypes, and numbers that mean nothing.

    For :meth:`Mesh.with_backend`. Every rank keeps what it has, as if it were alone: a gather has this rank's own part
    in the place of each, so arithmetic on it takes as long as ever and indices stay valid. Results take memory as
    usual. What ``plan`` compares between ranks is still sent.

    Args:
        kinds: of ``"all_gather"``, ``"psum_scatter"``, ``"psum"``, ``"pmax"`` and ``"all_to_all"``, see
            :class:`Collective`. Gradients are reduced by ``"psum_scatter"``, between replicas by ``"psum"``, and
            encoded ones by ``"all_to_all"``.

    Returns:
        A function from an axis to its backend, which passes everything else on.

    Raises:
        ValueError: another kind.

    Cost:
        No message; one copy of the result.

    Example:
        >>> mesh = fs.simulated_mesh(2).with_backend(fs.communication.skip("psum_scatter", "psum"))
        >>> rows = torch.tensor([[1, 2], [30, 40]])   # row r = rank r
        >>> mesh.spmd(lambda x: fs.collectives.psum_scatter(x, mesh))(rows)
        tensor([[ 1],
                [40]])

    Stands for ``FSDP_USE_FAKE_ALL_GATHER`` and ``FSDP_USE_FAKE_REDUCE``.
    """
    unknown = [f"{kind!r}: expected one of {', '.join(_KINDS)}" for kind in kinds if kind not in _KINDS]
    reject("skip", unknown, "Name kinds of collectives, as skip('all_gather').")

    def skipping(axis: Axis) -> Backend:
        def issue(op: Collective, x: Tensor, send: Issue) -> Work:
            return Finished(_own(op, x, axis)) if op.kind in kinds else send(op, x)

        return wrap(issue)(axis)

    return skipping


def _own(op: Collective, x: Tensor, axis: Axis) -> Tensor:
    simulated = axis.backend.simulated
    if op.kind == "all_gather":
        own = x[0] if simulated else x
        return torch.cat([own.to(op.device or x.device, op.dtype)] * axis.size, op.dim)
    if op.kind == "psum_scatter":
        if simulated:
            return torch.stack([row.chunk(axis.size, op.dim)[rank] for rank, row in enumerate(x.unbind(0))])
        return x.chunk(axis.size, op.dim)[int(axis.backend.index())].clone()
    return (x[0] if simulated and op.kind != "all_to_all" else x).clone()
