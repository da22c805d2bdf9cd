"""What goes where when parameters move from one layout to another: pure integers, no tensors."""

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


def copy_plan(old: Layout, new: Layout, home: Sequence[int | None] | None = None) -> list[Copy]:
    """The copies that fill every shard of ``new`` from the shards of ``old``, in the order of the new buffers.

    Every element of a parameter that both layouts have is written once on every rank that holds it in ``new``, and
    padding never. What a rank holds already it takes from itself; of several others that hold a piece (replicas, or
    parameters that are whole everywhere) ranks ask different ones.

    Args:
        old: where the parameters lie.
        new: where they are to lie; the same shapes and dtypes.
        home: the rank of ``old`` that each rank of ``new`` is, or ``None`` where it is none. Ranks count in row-major
            order of their mesh's axes. Equal numbers are one rank, unless given.

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
    if home is None:
        home = [rank if rank < old.mesh.size else None for rank in range(new.mesh.size)]
    old_ranks, new_ranks = ranks_by_shard(old), ranks_by_shard(new)
    plan = []
    for buffer in new.buffers.values():
        takers = new_ranks if buffer.num_shards > 1 else [range(new.mesh.size)]
        for slot in (slot for slot in buffer.slots if slot.name in old.slots):
            source = old.buffers[old.key_of[slot.name]]
            holders = old_ranks if source.num_shards > 1 else [range(old.mesh.size)]
            for piece in _pieces(source, old.slots[slot.name], buffer, slot):
                plan += _on_ranks(piece, holders[piece.source_rank], takers[piece.rank], home)
    return plan


def _pieces(source: Buffer, taken: Slot, buffer: Buffer, slot: Slot) -> Iterator[Copy]:
    """One parameter cut wherever either layout cuts it; ``rank`` counts shards."""
    start = 0
    while start < slot.numel:
        source_rank, source_offset = divmod(taken.offset + start, source.shard_numel)
        rank, offset = divmod(slot.offset + start, buffer.shard_numel)
        numel = min(slot.numel - start, source.shard_numel - source_offset, buffer.shard_numel - offset)
        yield Copy(source.key, source_rank, source_offset, buffer.key, rank, offset, numel)
        start += numel


def _on_ranks(piece: Copy, holders: Sequence[int], takers: Sequence[int], home: Sequence[int | None]) -> Iterator[Copy]:
    for rank in takers:
        own = home[rank]
        yield piece._replace(rank=rank, source_rank=own if own in holders else holders[rank % len(holders)])


def ranks_by_shard(layout: Layout) -> list[list[int]]:
    """The ranks, in row-major order of the axes, that hold each shard: one, or as many as there are replicas."""
    ranks: list[list[int]] = [[] for _ in range(layout.num_shards)]
    for rank, shard in enumerate(shards_of_ranks(layout)):
        ranks[shard].append(rank)
    return ranks
