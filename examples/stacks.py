"""Parameters that only some ranks use, such as experts or layers: a stack whose rows are divided over an axis."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import functorch_shard as fs


def with_stacks(mesh: fs.Mesh, axis: str, named: Mapping[str, Tensor], stacks: list[str]) -> Any:
    """Shards of all parameters, and a function of them that returns this rank's rows of stacks, and all others whole.

    A buffer is row-major, and its ranks count by ``axis`` first: those of one place on it have parts of the same rows,
    and an all-gather over "shard" makes these whole. ``fs.grad`` takes the mean of all gradients over all ranks.
    """
    others = {name: x for name, x in named.items() if name not in stacks}
    of_others = fs.plan(others, mesh, shard_axis=(axis, "shard"))
    rows = {name: named[name] for name in stacks}
    of_rows = fs.plan(rows, mesh, shard_axis=(axis, "shard"), units=[[name] for name in stacks])

    def local(params: fs.Sharded) -> dict[str, Tensor]:
        full = dict(fs.gather(fs.Sharded({key: params[key] for key in of_others.buffers}, of_others), lazy=False))
        for key, buffer in of_rows.buffers.items():
            shard = fs.collectives.all_gather(params[key], mesh["shard"])
            full[buffer.slots[0].name] = shard.view(-1, *buffer.slots[0].shape[1:])
        return full

    return fs.merge(fs.shard(others, of_others), fs.shard(rows, of_rows)), local
