"""Whole parameters on one rank alone: to save them, to export them, to look at them."""

from __future__ import annotations

import torch

from ..collectives.without_derivative import refuse_derivatives
from ..eager import eager
from ..layout.layout import Layout
from ..layout.trees import Full, Sharded, by_unit
from ..layout.validation import check_sharded, check_shards
from .gather import gather


@eager
def gather_to(
    params: Sharded, rank: int = 0, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Full | None:
    """The whole parameters on one rank, and ``None`` on the others, which have one unit at a time in memory.

    On ``rank``, ``gather_to(params, rank)`` has the values of ``gather(params, lazy=False)`` bitwise.

    Args:
        params: parameters, or any ``Sharded`` of their shape; every real rank calls this.
        rank: which one, counted in row-major order of the mesh's axes; the same number on every rank.
        device: where to put them; ``"cpu"`` leaves no more than one unit on the mesh's device. ``None``: there.
        dtype: what to gather floating-point shards in, as in :func:`gather`.

    Returns:
        A ``Full`` of plain tensors without a graph on ``rank``, ``None`` on every other rank. On a simulated mesh,
        whose ranks are one process, the ``Full``, without rank dims.

    Raises:
        TypeError: ``params`` is not a ``Sharded``, ``rank`` not an int, or ``dtype`` is not a floating-point one.
        ValueError: there is no such rank, or shards that do not fit their layout.
        RuntimeError: inside ``spmd`` of simulated ranks, where all return alike; inside a transform, or of what
            ``fs.grad`` differentiates by.

    Cost:
        One all-gather per buffer; the memory of one unit, and on ``rank`` of the whole parameters on ``device``.

    Example:
        >>> params = fs.shard({"fc.w": torch.ones(3)}, fs.plan({"fc.w": torch.ones(3)}, fs.simulated_mesh(2)))
        >>> gather_to(params, device="cpu")["fc.w"]
        tensor([1., 1., 1.])

    Stands for ``FullStateDictConfig(rank0_only=True, offload_to_cpu=True)`` of FSDP1, and its ``rank0_only``.
    """
    check_sharded("gather_to: params", params)
    layout = params.layout
    _check_rank(rank, layout)
    check_shards("gather_to", params, layout)
    refuse_derivatives("gather_to", params.values())
    mine = layout.mesh.is_simulated or layout.mesh.rank == rank
    whole: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for unit in by_unit(params):
            part = gather(unit, lazy=False, dtype=dtype)
            if mine:
                whole.update({name: x.to(device) for name, x in part.items()})
            del part  # before the next one is gathered
    return Full({name: whole[name] for name in layout.slots}, layout) if mine else None


def _check_rank(rank: int, layout: Layout) -> None:
    mesh = layout.mesh
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"gather_to: rank: got {rank!r}, expected the number of a rank")
    if not 0 <= rank < mesh.size:
        raise ValueError(f"gather_to: rank: got {rank}, expected 0 <= rank < {mesh.size}, a rank of {mesh}")
    if mesh.is_simulated and mesh.in_spmd:
        raise RuntimeError(
            "gather_to: inside spmd of simulated ranks every rank returns alike, and none can return None. Call it "
            "outside, on the stacked tree."
        )
