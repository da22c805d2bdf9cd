"""The copies that move parameters from one layout to another: integers only, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .buffers import Buffer, Slot
from .layout import Layout
from .ranks import shards_of_ranks


class Copy(NamedTuple):
    """``shard of rank [offset:offset + numel] = shard of source_rank [source_offset:source_offset + numel]``."""

    source_key: str
    source_rank: int
    source_offset: int
    key: str
    rank: int
    offset: int
    numel: int


def copy_plan(old: Layout, new: Layout, old_rank: Sequence[int | None] | None = None) -> list[Copy]:
    """The copies that fill every shard of ``new`` from the shards of ``old``, in the order of the new buffers.

    Every element of a parameter that both layouts have is written once on every rank that holds it in ``new``; padding
    is not written. A rank copies from itself what it holds already; of several other holders (replicas, or parameters
    that are whole on every rank) different ranks use different ones.

    Args:
        old: the layout of the source.
        new: the layout of the result; the same shapes and dtypes.
        old_rank: the rank of ``old`` that each rank of ``new`` is, or ``None`` if it is not in ``old``. Ranks count in
            row-major order of their mesh's axes. By default equal numbers are the same rank.

    Returns:
        A list of :class:`Copy`, in elements. Offsets count from the start of a shard.

    Example:
        >>> old = fs.plan({"w": torch.zeros(3)}, fs.simulated_mesh(1))
        >>> new = fs.plan({"w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> for c in copy_plan(old, new):
        ...     print(f"rank {c.rank}: {c.numel} to {c.offset}, from {c.source_offset} of rank {c.source_rank}")
        rank 0: 2 to 0, from 0 of rank 0
        rank 1: 1 to 0, from 2 of rank 0
    """
    if old_rank is None:
        old_rank = [rank if rank < old.mesh.size else None for rank in range(new.mesh.size)]
    old_ranks, new_ranks = ranks_by_shard(old), ranks_by_shard(new)
    plan = []
    for buffer in new.buffers.values():
        takers = new_ranks if buffer.num_shards > 1 else [range(new.mesh.size)]
        for slot in (slot for slot in buffer.slots if slot.name in old.slots):
            source = old.buffers[old.key_of[slot.name]]
            holders = old_ranks if source.num_shards > 1 else [range(old.mesh.size)]
            for part in _parts(source, old.slots[slot.name], buffer, slot):
                sources = holders[part.source_rank]
                for rank in takers[part.rank]:
                    own = old_rank[rank]
                    source_rank = own if own in sources else sources[rank % len(sources)]
                    plan.append(part._replace(rank=rank, source_rank=source_rank))
    return plan


def _parts(source: Buffer, taken: Slot, buffer: Buffer, slot: Slot) -> Iterator[Copy]:
    """One parameter cut wherever either layout cuts it; ``rank`` counts shards."""
    start = 0
    while start < slot.numel:
        source_rank, source_offset = divmod(taken.offset + start, source.shard_numel)
        rank, offset = divmod(slot.offset + start, buffer.shard_numel)
        numel = min(slot.numel - start, source.shard_numel - source_offset, buffer.shard_numel - offset)
        yield Copy(source.key, source_rank, source_offset, buffer.key, rank, offset, numel)
        start += numel


def ranks_by_shard(layout: Layout) -> list[list[int]]:
    """The ranks, in row-major order of the axes, that hold each shard: one, or as many as there are replicas."""
    ranks: list[list[int]] = [[] for _ in range(layout.num_shards)]
    for rank, shard in enumerate(shards_of_ranks(layout)):
        ranks[shard].append(rank)
    return ranks
