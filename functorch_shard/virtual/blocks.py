"""Sums over sharded trees that do not depend on the number of ranks.

Note [Blocks]: in a layout of V virtual ranks a buffer has V blocks, and the shard of a rank is some of them. Each block
is reduced to a number where it is; all ranks get these numbers, and each adds up the same vector of V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ..collectives.primitives import all_gather
from ..communication.backend import Axis
from ..layout.buffers import Buffer
from ..layout.layout import Layout, shard_axis, shard_index


def sums_by_block(
    shards: Iterable[tuple[Buffer, Tensor]],
    layout: Layout,
    total_of: Callable[[Tensor], Tensor],
    by_slot: Callable[[Tensor, Buffer, int], Iterable[Tensor]] | None = None,
) -> dict[tuple[str, tuple[Axis, ...]], Tensor]:
    """Return the totals of shards over all ranks, by the key of a buffer, or with ``by_slot`` by name.

    ``total_of`` reduces a tensor to a number; ``by_slot`` one shard of a buffer to one for each of its parameters.
    """
    found: dict[tuple[str, tuple[Axis, ...]], list[Tensor]] = {}
    for buffer, x in shards:
        number, rank = layout.virtual_ranks // buffer.num_shards, int(shard_index(buffer, layout))
        axes = (shard_axis(layout),) if buffer.num_shards > 1 else ()
        cut = replace(buffer, num_shards=layout.virtual_ranks)
        names = [slot.name for slot in buffer.slots] if by_slot else [buffer.key]
        for i, block in enumerate(x.tensor_split(number), rank * number):
            totals = by_slot(block, cut, i) if by_slot else [total_of(block)]
            for name, total in zip(names, totals, strict=True):
                found.setdefault((name, axes), []).append(total)
    blocks = {key: torch.stack(each) for key, each in found.items()}
    sharded = [key for key in blocks if key[1]]
    for dtype in dict.fromkeys(blocks[key].dtype for key in sharded):
        same = [key for key in sharded if blocks[key].dtype == dtype]
        rows = all_gather(torch.stack([blocks[key] for key in same], 1), shard_axis(layout))
        blocks |= zip(same, rows.unbind(1), strict=True)
    return {key: total_of(x.contiguous()) for key, x in blocks.items()}
