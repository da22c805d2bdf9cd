"""Maps the shards in this process to regions of named tensors: views, without communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..layout.buffers import Buffer, Slot
from ..layout.layout import Layout, ranks_by_shard, shards_of_ranks
from ..layout.trees import Sharded, is_number, rows_here
from ..mesh.mesh import Mesh
from .names import Leaf, Path
from .regions import SCALAR, Region, regions


@dataclass(frozen=True)
class Chunk:
    """A region of a tensor of ``shape``, and a view of its elements in this process.

    A tied parameter has several ``paths``. ``rank`` holds it; ``writes``: whether that rank saves it, and not another
    one with the same elements.
    """

    paths: tuple[Path, ...]
    shape: tuple[int, ...]
    region: Region
    values: Tensor
    rank: int
    writes: bool


def chunks_of(leaf: Leaf, participants: Mesh) -> Iterator[Chunk]:
    """The local chunks of one leaf; none for a plain value. ``participants``: the ranks that save or load."""
    x, rank = leaf.value, participants.rank
    if isinstance(x, Tensor):
        yield Chunk((leaf.path(),), tuple(x.shape), Region.whole(x.shape), x.detach(), rank, rank == 0)
    if not isinstance(x, Sharded):
        return
    for key, shard in x.items():
        if isinstance(shard, Tensor) and is_number(shard, x.layout):  # once under the name of each parameter
            number = shard.detach()[(0,) * shard.ndim]
            for slot in x.layout.buffers[key].slots:
                yield Chunk(leaf.paths(slot.name), (), SCALAR, number, rank, rank == 0)
        elif isinstance(shard, Tensor):
            yield from _of_buffer(leaf, x.layout.buffers[key], shard.detach(), participants)


def _of_buffer(leaf: Leaf, buffer: Buffer, x: Tensor, participants: Mesh) -> Iterator[Chunk]:
    layout = leaf.value.layout
    by_shard, shard_of, first = ranks_by_shard(layout), shards_of_ranks(layout), _is_first_sibling(layout, buffer)
    for rank, row in rows_here(x, layout.mesh).items():
        writer = rank if participants.is_simulated else participants.rank
        holders = by_shard[shard_of[rank]] if buffer.num_shards > 1 else range(layout.mesh.size)
        for part in buffer.slices(shard_of[rank]):
            slot, at = layout.slots[part.name], part.offset
            writes = holders[slot.index % len(holders)] == rank and first[slot.name]
            shape, origin = _origin(layout, slot)
            for region in regions(slot.shape, part.start, part.numel):
                values = row[at : at + region.numel].view(region.sizes)
                at += region.numel
                yield Chunk(leaf.paths(slot.name), shape, region.shifted(origin), values, writer, writes)
        for slot in (slot for slot in buffer.slots if not slot.numel and slot.dtensor is None):  # in files only
            region = Region.whole(slot.shape)
            yield Chunk(leaf.paths(slot.name), slot.shape, region, x.new_empty(slot.shape), writer, rank == 0)


def _origin(layout: Layout, slot: Slot) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the whole parameter, and where this process's slot begins in it: a DTensor's local tensor."""
    spec = slot.dtensor
    if spec is None:
        return slot.shape, (0,) * len(slot.shape)
    return spec.shape, spec.part_at(layout.tensor_meshes[spec.axes].coordinate)[1]


def _is_first_sibling(layout: Layout, buffer: Buffer) -> Mapping[str, bool]:
    """Which parameters of ``buffer`` this process writes, and not another one with the same elements of a DTensor."""
    coordinates = {}
    for axes, mesh in layout.tensor_meshes.items():
        coordinates.update(zip(dict(axes), mesh.coordinate, strict=True))
    return {
        slot.name: not any(
            i for axis, i in coordinates.items() if slot.dtensor is None or axis not in slot.dtensor.cut_over
        )
        for slot in buffer.slots
    }
