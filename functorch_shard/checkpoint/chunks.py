"""Maps the shards in this process to regions of named tensors: views, without communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from ..layout.buffers import Buffer, Slot
from ..layout.layout import Layout
from ..layout.ranks import ranks_by_shard, ranks_here
from ..layout.trees import Sharded
from ..mesh.mesh import Mesh
from .names import Leaf, Path
from .regions import Region, regions

SCALAR = Region((), ())


@dataclass(frozen=True)
class LocalChunk:
    """A region of a tensor of ``shape``, and a view of its elements in this process.

    ``rank`` holds it; ``writes``: whether that rank saves it, and not another one with the same elements.
    """

    path: Path
    shape: tuple[int, ...]
    region: Region
    values: Tensor
    rank: int
    writes: bool
    aliases: tuple[Path, ...] = ()  # further names of a tied parameter


@dataclass(frozen=True)
class _Place:
    """A rank in this process, its index in a stacked tensor, and its position among the ranks with the same shard."""

    rank: int
    row: tuple[int, ...]
    shard: int
    copy: int
    copies: int


def chunks_of(leaf: Leaf, participants: Mesh) -> Iterator[LocalChunk]:
    """The local chunks of one leaf; none for a plain value. ``participants``: the ranks that save or load."""
    if isinstance(leaf.value, Sharded):
        yield from _of_sharded(leaf, leaf.value, participants)
    elif isinstance(leaf.value, Tensor):
        x = leaf.value.detach()
        yield LocalChunk(leaf.path(), tuple(x.shape), _all_of(x.shape), x, participants.rank, participants.rank == 0)


def aliases_of(leaf: Leaf, name: str) -> tuple[Path, ...]:
    """The further paths of a tied parameter."""
    return tuple(leaf.path(alias) for alias in leaf.value.layout.aliases_of.get(name, ()))


def is_number(x: Tensor, layout: Layout) -> bool:
    """Whether ``x`` is one number for its whole buffer, as a step count is, and not a shard."""
    return x.ndim == (len(layout.axes) if layout.mesh.is_simulated else 0)


def _all_of(shape: Sequence[int]) -> Region:
    return Region((0,) * len(shape), tuple(shape))


def _of_sharded(leaf: Leaf, tree: Sharded, participants: Mesh) -> Iterator[LocalChunk]:
    layout, places, first = tree.layout, _places(tree.layout), _is_first_sibling(tree.layout)
    for key, x in tree.items():
        if isinstance(x, Tensor) and is_number(x, layout):
            yield from _of_number(leaf, layout.buffers[key], x.detach(), participants)
        elif isinstance(x, Tensor):
            for place in places:
                yield from _of_shard(leaf, layout.buffers[key], x.detach(), place, participants, first)


def _of_number(leaf: Leaf, buffer: Buffer, x: Tensor, participants: Mesh) -> Iterator[LocalChunk]:
    """The number, once under the name of each parameter of the buffer."""
    number = x[(0,) * x.ndim]
    for slot in buffer.slots:
        aliases = aliases_of(leaf, slot.name)
        yield LocalChunk(leaf.path(slot.name), (), SCALAR, number, participants.rank, participants.rank == 0, aliases)


def _of_shard(
    leaf: Leaf, buffer: Buffer, x: Tensor, place: _Place, participants: Mesh, first: Mapping[str, bool]
) -> Iterator[LocalChunk]:
    layout = leaf.value.layout
    shard = x[place.row] if layout.mesh.is_simulated else x
    copy, copies = (place.copy, place.copies) if buffer.num_shards > 1 else (place.rank, layout.mesh.size)
    rank = place.rank if participants.is_simulated else participants.rank
    for part in buffer.slices(place.shard):
        slot = layout.slots[part.name]
        writes = slot.index % copies == copy and first[slot.name]
        shape, origin = _origin(layout, slot)
        path, aliases, at = leaf.path(slot.name), aliases_of(leaf, slot.name), part.offset
        for region in regions(slot.shape, part.start, part.numel):
            values = shard[at : at + region.numel].view(region.sizes)
            at += region.numel
            yield LocalChunk(path, shape, region.shifted(origin), values, rank, writes, aliases)
    for slot in (slot for slot in buffer.slots if not slot.numel and slot.dtensor is None):  # in files, not in shards
        empty, aliases = x.new_empty(slot.shape), aliases_of(leaf, slot.name)
        yield LocalChunk(leaf.path(slot.name), slot.shape, _all_of(slot.shape), empty, rank, place.rank == 0, aliases)


def _places(layout: Layout) -> list[_Place]:
    """The ranks of the layout that are in this process."""
    held = {
        rank: (shard, copy, len(ranks))
        for shard, ranks in enumerate(ranks_by_shard(layout))
        for copy, rank in enumerate(ranks)
    }
    rows = [*product(*map(range, layout.mesh.axes.values()))]
    return [_Place(rank, rows[rank], *held[rank]) for rank in ranks_here(layout.mesh)]


def _origin(layout: Layout, slot: Slot) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the whole parameter, and where this process's slot begins in it: a DTensor's local tensor."""
    spec = slot.dtensor
    if spec is None:
        return slot.shape, (0,) * len(slot.shape)
    return spec.shape, spec.local_start(layout.tensor_meshes[spec.axes].coordinate)


def _is_first_sibling(layout: Layout) -> dict[str, bool]:
    """Whether this process writes a parameter, and not another one with the same elements on the axes of DTensors."""
    coordinates = {}
    for axes, mesh in layout.tensor_meshes.items():
        coordinates.update(zip(dict(axes), mesh.coordinate, strict=True))
    return {
        name: not any(i for axis, i in coordinates.items() if slot.dtensor is None or axis not in slot.dtensor.cut_over)
        for name, slot in layout.slots.items()
    }
