"""``gather(rank=)``: the whole parameters on one rank, while the others have one unit in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..collectives.sinks import refuse_derivatives
from ..layout.trees import Full, Sharded, by_unit, check_sharded, check_shards, map_items
from .partition import merge


def gather_on_rank(gather: Callable[[Sharded], Full], rank: int, *trees: Sharded) -> Full | None:
    """Return the whole parameters on the CPU of ``rank``, and ``None`` on the others; ``gather`` gathers a unit."""
    for tree in trees:
        check_sharded("gather", tree, "; it is whole already" if isinstance(tree, Full) else "")
    params = merge(*trees)
    layout, mesh = params.layout, params.layout.mesh
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < mesh.size:
        raise ValueError(f"gather: rank: got {rank!r}, expected an int from 0 to {mesh.size - 1}, a rank of {mesh}")
    if mesh.is_simulated and mesh.in_spmd:
        raise RuntimeError(
            "gather: rank: inside spmd of simulated ranks all ranks return alike, and none can return None. Call it "
            "outside, on the stacked tree."
        )
    check_shards("gather", params, layout)
    refuse_derivatives("gather(rank=)", params.values())
    whole: dict[str, Tensor] = {}
    mine = mesh.is_simulated or mesh.rank == rank
    with torch.no_grad():
        for unit in by_unit(params):
            part = gather(map_items(lambda _, x: x.detach(), unit))
            if mine:
                whole.update({name: x.cpu() for name, x in part.items()})
            del part  # before the next unit is gathered
    return Full({name: whole[name] for name in layout.slots}, layout) if mine else None
