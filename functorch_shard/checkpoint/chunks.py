"""The parts of named tensors that are in this process, in their true shapes: views of shards, without communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from ..layout.buffers import Buffer, Slot
from ..layout.layout import Layout
from ..layout.trees import Sharded
from ..mesh.mesh import Mesh
from .names import Leaf, Path, PerRank
from .regions import Box, boxes

SCALAR = Box((), ())


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of ``shape`` and its elements here, a view; ``rank`` holds it, and writes it or leaves it."""

    path: Path
    shape: tuple[int, ...]
    box: Box
    values: Tensor
    rank: int
    writes: bool
    aliases: tuple[Path, ...] = ()  # further names of a tied parameter


@dataclass(frozen=True)
class _Place:
    """One rank that is in this process, and which of the copies of a shard is its."""

    rank: int
    row: tuple[int, ...]  # of a stacked tensor
    shard: int
    copy: int
    copies: int


def pieces_of(leaf: Leaf, party: Mesh) -> Iterator[Piece]:
    """Of one leaf; ``party`` counts the ranks. Nothing of what is no tensor."""
    if isinstance(leaf.value, Sharded):
        yield from _of_sharded(leaf, leaf.value, party)
    elif isinstance(leaf.value, PerRank):
        yield from _of_each_rank(leaf, leaf.value.tensor, party)
    elif isinstance(leaf.value, Tensor):
        x = leaf.value.detach()
        yield Piece(leaf.path(), tuple(x.shape), whole(x.shape), x, party.rank, party.rank == 0)


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def aliases_of(leaf: Leaf, name: str) -> tuple[Path, ...]:
    """The further paths of a parameter that is tied, in a leaf that holds it."""
    return tuple(leaf.path(alias) for alias in leaf.value.layout.aliases_of.get(name, ()))


def is_number(x: Tensor, layout: Layout) -> bool:
    """Whether a leaf of a ``Sharded`` is one number for its whole buffer; Note [Leaves of a buffer] in holdings.py."""
    return x.ndim == (len(layout.axes) if layout.mesh.is_simulated else 0)


def _of_sharded(leaf: Leaf, tree: Sharded, party: Mesh) -> Iterator[Piece]:
    layout, first = tree.layout, _is_first_beside(tree.layout)
    for key, x in tree.items():
        if isinstance(x, Tensor) and is_number(x, layout):
            yield from _of_number(leaf, layout.buffers[key], x.detach(), party)
        elif isinstance(x, Tensor):
            yield from _of_buffer(leaf, layout, layout.buffers[key], x.detach(), party, first)


def _of_number(leaf: Leaf, buffer: Buffer, x: Tensor, party: Mesh) -> Iterator[Piece]:
    """The one number under the names of all of its parameters."""
    number = x[(0,) * x.ndim]
    for slot in buffer.slots:
        aliases = aliases_of(leaf, slot.name)
        yield Piece(leaf.path(slot.name), (), SCALAR, number, party.rank, party.rank == 0, aliases)


def _of_buffer(
    leaf: Leaf, layout: Layout, buffer: Buffer, x: Tensor, party: Mesh, first: Mapping[str, bool]
) -> Iterator[Piece]:
    for place in _places(layout):
        shard = x[place.row] if layout.mesh.is_simulated else x
        shards = buffer.num_shards
        copy, copies = (place.copy, place.copies) if shards > 1 else (place.rank, layout.mesh.size)
        rank = place.rank if party.is_simulated else party.rank
        for piece in buffer.slices(place.shard):
            slot = layout.slots[piece.name]
            mine = slot.index % copies == copy and first[slot.name]
            shape, origin = _origin(layout, slot)
            at = piece.offset
            for box in boxes(slot.shape, piece.start, piece.numel):
                values = shard[at : at + box.numel].view(box.sizes)
                at += box.numel
                aliases = aliases_of(leaf, slot.name)
                yield Piece(leaf.path(slot.name), shape, box.shifted(origin), values, rank, mine, aliases)
        for slot in (slot for slot in buffer.slots if not slot.numel and slot.dtensor is None):
            empty, aliases = x.new_empty(slot.shape), aliases_of(leaf, slot.name)  # in no shard, and still in the files
            yield Piece(leaf.path(slot.name), slot.shape, whole(slot.shape), empty, rank, place.rank == 0, aliases)


def _of_each_rank(leaf: Leaf, x: Tensor, party: Mesh) -> Iterator[Piece]:
    x = x.detach()
    if party.is_simulated:
        rows = x.reshape(party.size, *x.shape[len(party.axes) :])
        ranks: Sequence[int] = range(party.size)
    else:
        rows, ranks = x[None], [party.rank]
    shape = (party.size, *rows.shape[1:])
    for rank, row in zip(ranks, rows.split(1), strict=True):
        box = Box((rank, *(0 for _ in shape[1:])), (1, *shape[1:]))
        yield Piece(leaf.path(), shape, box, row, rank, True)


def _places(layout: Layout) -> Iterator[_Place]:
    """The ranks of the layout that are in this process."""
    mesh = layout.mesh
    copies = mesh.size // layout.num_shards
    coordinates = product(*map(range, mesh.axes.values())) if mesh.is_simulated else [mesh.coordinate]
    for row in coordinates:
        at = dict(zip(mesh.axes, row, strict=True))
        rank, copy = _count(at, mesh.axes), _count({k: i for k, i in at.items() if k != layout.shard_axis}, mesh.axes)
        yield _Place(rank, row, at.get(layout.shard_axis, 0), copy, copies)


def _count(at: Mapping[str, int], axes: Mapping[str, int]) -> int:
    """A position on some axes as one number, in row-major order."""
    number = 0
    for name, index in at.items():
        number = number * axes[name] + index
    return number


def _origin(layout: Layout, slot: Slot) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the parameter as others know it, and where in it this process's slot begins: of DTensors, a part."""
    form = slot.dtensor
    if form is None:
        return slot.shape, (0,) * len(slot.shape)
    return form.shape, form.local_start(layout.tensor_meshes[form.axes].coordinate)


def _is_first_beside(layout: Layout) -> dict[str, bool]:
    """Whether this process, of those beside it on the axes of DTensors, is the one to write a parameter's elements."""
    beside = {}
    for axes, mesh in layout.tensor_meshes.items():
        beside.update(zip(dict(axes), mesh.coordinate, strict=True))
    return {
        name: not any(i for axis, i in beside.items() if slot.dtensor is None or axis not in slot.dtensor.cut_over)
        for name, slot in layout.slots.items()
    }
