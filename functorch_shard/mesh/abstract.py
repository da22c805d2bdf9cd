"""A mesh whose ranks are not there: to plan for them and to trace what one of them does."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from ..communication.axis import Axis
from ..communication.backend import AbstractBackend
from .axes import check_axes, coordinate_of
from .mesh import Mesh


def abstract_mesh(axes: int | Mapping[str, int], *, rank: int = 0, device: torch.device | str = "meta") -> Mesh:
    """One rank of a job of any size, without the others: what it would hold, send and keep alive.

    ``compile(step).trace`` on it gives the schedule that the same step has on real ranks. ``plan``, and ``shard`` of a
    model on the meta device, give this rank's part. Nothing can be sent: a collective outside of a trace raises.

    Args:
        axes: the number of ranks of one axis ``"shard"``, or sizes by name, outermost first.
        rank: which one this is, in row-major order of the axes.
        device: where its values are; the meta device needs no memory.

    Returns:
        A mesh of real ranks, as its rank sees it.

    Raises:
        ValueError: a size below 1, no axis, or no such rank.

    Cost:
        Nothing.

    Example:
        >>> mesh = abstract_mesh(512)
        >>> with torch.device("meta"):
        ...     model = nn.Linear(1024, 1024)
        >>> params = fs.shard(model, fs.plan(model, mesh))
        >>> loss = lambda params, x: torch.func.functional_call(model, fs.gather(params), (x,)).sum()
        >>> traced = fs.compile(fs.grad(loss)).trace(params, torch.empty(8, 1024, device="meta"))
        >>> {kind: one.sent for (_, kind), one in traced.traffic(mesh.axes).items()}
        {'all_gather': 4190200, 'psum_scatter': 4190200}

    JAX has ``jax.sharding.AbstractMesh``.
    """
    sizes = {"shard": axes} if isinstance(axes, int) else dict(axes)
    check_axes("abstract_mesh", sizes)
    total = prod(sizes.values())
    if not 0 <= rank < total:
        raise ValueError(f"abstract_mesh: rank: got {rank}, expected 0 <= rank < {total}, a rank of {sizes}")
    places = zip(sizes.items(), coordinate_of(rank, list(sizes.values())), strict=True)
    return Mesh(tuple(Axis(name, size, AbstractBackend(at)) for (name, size), at in places), torch.device(device))
