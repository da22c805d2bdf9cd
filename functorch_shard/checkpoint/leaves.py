"""Flattens trees into named leaves, with the names of torch's own state dicts, and leaves into regions of tensors.

Note [Names]: a name joins the entries of a path by dots, as ``torch.distributed.checkpoint`` does for a state dict:
``{"model": params}`` has the names ``model.<parameter>``. There are two exceptions. The state of an optimizer, a dict
of ``Sharded`` below the top, is named parameter by parameter, ``optim.state.<parameter>.exp_avg``, as in
``get_optimizer_state_dict``. And the parts of a tuple, ``(trainable, frozen)`` or ``(params, buffers)``, form one
dict, as in ``gather``: ``{"model": (params, buffers)}`` has the names of the module's state dict. Any other tuple with
tensors in it is a list; torch, which writes a tuple as one value, does not find its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import add
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from ..layout.buffers import Buffer, Slot
from ..layout.layout import Layout, as_held, holders_of, shards_of_ranks
from ..layout.trees import Sharded, is_number, rows_here
from ..mesh.mesh import Mesh
from ..sharding.gather import gather
from .format import SCALAR, Path, Region, dotted, regions


class Leaf(NamedTuple):
    """A tensor, a plain value, or what a ``Sharded`` has for one buffer: a shard, a number, or None, nothing yet.

    ``paths``: of each parameter of the buffer, of which a tied one has several; otherwise of the value.
    """

    value: Any
    paths: tuple[tuple[Path, ...], ...]
    buffer: Buffer | None = None
    layout: Layout | None = None

    def __str__(self) -> str:
        return dotted(self.paths[0][0])

    @property
    def tensor(self) -> Tensor | None:
        return self.value if isinstance(self.value, Tensor) else None

    @property
    def shard(self) -> Tensor | None:
        """The value, if it has elements of the parameters of a buffer."""
        x = self.tensor
        return None if x is None or self.layout is None or is_number(x, self.layout) else x

    @property
    def is_number(self) -> bool:
        """Whether it is a tensor that has one number for its whole buffer."""
        return self.tensor is not None and self.buffer is not None and self.shard is None

    @property
    def is_plain(self) -> bool:
        return self.tensor is None and not (self.value is None and self.buffer)

    def parameters(self) -> Iterator[tuple[Slot | None, list[str]]]:
        """Each parameter of the buffer with its names; for another value None with its name."""
        slots: Sequence[Slot | None] = self.buffer.slots if self.buffer else [None]
        return ((slot, [*map(dotted, paths)]) for slot, paths in zip(slots, self.paths, strict=True))

    def wholes(self) -> Iterator[tuple[list[str], Any]]:
        """The names and the whole value of each parameter, which is gathered; for another value its name with it."""
        x, gathered = self.value, dict[str, Any]()
        if self.buffer and self.layout and self.shard is not None:
            shards = {self.buffer.key: x.detach()}
            gathered = gather(Sharded(shards, as_held(self.layout, shards)), lazy=False)
        elif self.is_number:
            x = x[(0,) * x.ndim]
        for slot, names in self.parameters():
            value = gathered[slot.name] if slot and gathered else x
            yield names, value.full_tensor() if slot and slot.dtensor and gathered else value


def leaves_of(tree: Any) -> list[Leaf]:
    """List the leaves of a tree."""
    found: list[Leaf] = []
    _visit(tree, (), found.append)
    return found


def with_values(tree: Any, values: Iterator[Any]) -> Any:
    """Rebuild ``tree`` with other values, in the order of :func:`leaves_of`."""
    return _visit(tree, (), lambda _: next(values))


def tensor_problem(x: Tensor) -> str:
    """Why ``x`` cannot be read back as it is, from a file that one rank writes; empty if it can.

    A lazy tensor cannot: one rank alone would gather it.
    """
    if type(x) not in (Tensor, nn.Parameter) or x.is_quantized or x.is_nested or x.layout != torch.strided:
        return f"got a {type(x).__name__} of {x.dtype}, {x.layout}, expected a plain tensor"
    return "without values, on the meta device" if x.is_meta else ""


def _visit(x: Any, path: Path, make: Callable[[Leaf], Any]) -> Any:
    if isinstance(x, Sharded):
        return _visit_sharded(x, path, (), make)
    if _is_optimizer_state(x, path):
        base = path if path[-1] == "state" else (*path, "state")
        return {name: _visit_sharded(tree, base, (name,), make) for name, tree in x.items()}
    if _is_leaf(x):
        return make(Leaf(x, ((path,),)))
    children, metadata, entries, rebuild = optree.tree_flatten_one_level(x, none_is_leaf=True)
    made, is_union = list[Any](), _is_union(x)
    for entry, child in zip(entries, children, strict=True):
        # Ints are positions in a list, keys of dicts are strings, as in torch.distributed.checkpoint.
        name = entry if isinstance(entry, int) and not isinstance(x, Mapping) else str(entry)
        made.append(_visit(child, path if is_union else (*path, name), make))
    return rebuild(metadata, made)


def _visit_sharded(tree: Sharded, before: Path, after: Path, make: Callable[[Leaf], Any]) -> Sharded:
    layout, made = tree.layout, dict[str, Any]()
    for key, x in tree.items():
        names = [(slot.name, *layout.aliases_of.get(slot.name, ())) for slot in layout.buffers[key].slots]
        paths = tuple(tuple((*before, name, *after) for name in each) for each in names)
        made[key] = make(Leaf(x, paths, layout.buffers[key], layout))
    return Sharded(made, layout)


def _is_optimizer_state(x: Any, path: Path) -> bool:
    return bool(path) and type(x) is dict and bool(x) and all(isinstance(tree, Sharded) for tree in x.values())


def _is_union(x: Any) -> bool:
    return type(x) is tuple and bool(x) and all(isinstance(part, (Sharded, Mapping)) or _is_union(part) for part in x)


def _is_leaf(x: Any) -> bool:
    """Dicts are always entered, other containers where they contain tensors or dicts, as in torch's format."""
    if isinstance(x, (Sharded, Tensor)) or optree.tree_is_leaf(x, none_is_leaf=True):
        return True
    parts = optree.tree_flatten_one_level(x, none_is_leaf=True)[0]
    named = (isinstance(part, (Tensor, Sharded, Mapping)) or not _is_leaf(part) for part in parts)
    return not isinstance(x, Mapping) and not any(named)


class Chunk(NamedTuple):
    """A region of a tensor of ``shape``, and a view of its elements in this process; or the bytes of a plain value.

    A tied parameter has several ``paths``, and a number those of all parameters of its buffer. ``rank`` holds it;
    ``writes``: whether that rank saves it, and not another one with the same elements.
    """

    paths: tuple[Path, ...]
    shape: tuple[int, ...]
    region: Region
    values: Any
    rank: int
    writes: bool


def chunks_of(leaf: Leaf, participants: Mesh) -> Iterator[Chunk]:
    """The chunks of one leaf in this process. ``participants``: the ranks that save or load."""
    x, rank, paths = leaf.tensor, participants.rank, tuple(chain(*leaf.paths))
    if leaf.buffer and leaf.layout and leaf.shard is not None:
        yield from _of_buffer(leaf, leaf.buffer, leaf.layout, leaf.shard.detach(), participants)
    elif x is not None:
        x = x.detach()[(0,) * x.ndim] if leaf.buffer else x.detach()
        yield Chunk(paths, tuple(x.shape), Region.whole(x.shape), x, rank, rank == 0)
    elif leaf.is_plain:
        yield Chunk(paths, (), SCALAR, leaf.value, rank, rank == 0)


def _of_buffer(leaf: Leaf, buffer: Buffer, layout: Layout, x: Tensor, participants: Mesh) -> Iterator[Chunk]:
    paths = {slot.name: paths for slot, paths in zip(buffer.slots, leaf.paths, strict=True)}
    meshes, shard_of = layout.tensor_meshes, shards_of_ranks(layout).flatten().tolist()
    coordinate = {axis: i for axes in meshes for axis, i in zip(dict(axes), meshes[axes].coordinate, strict=True)}
    for rank, row in rows_here(x, layout.mesh).items():
        writer = rank if participants.is_simulated else participants.rank
        holders = holders_of(buffer, layout)[shard_of[rank] if buffer.num_shards > 1 else 0]
        for part in buffer.slices(shard_of[rank]):
            slot, at = layout.slots[part.name], part.offset
            spec, shape, origin = slot.dtensor, slot.shape, (0,) * len(slot.shape)
            if spec:
                shape, origin = spec.shape, spec.part_at(meshes[spec.axes].coordinate)[1]
            # what several ranks of a tensor axis have is written by its first one
            is_first = not any(i for axis, i in coordinate.items() if spec is None or axis not in spec.cut_over)
            # and of copies that may differ the first one has all
            writes = is_first and holders[slot.index % len(holders) if layout.copies_are_equal else 0] == rank
            for region in regions(slot.shape, part.start, part.numel):
                values = row[at : at + region.numel].view(region.sizes)
                at += region.numel
                moved = Region(tuple(map(add, region.offsets, origin)), region.sizes)
                yield Chunk(paths[slot.name], shape, moved, values, writer, writes)
        for slot in (slot for slot in buffer.slots if not slot.numel and slot.dtensor is None):  # in files only
            empty = x.new_empty(slot.shape)
            yield Chunk(paths[slot.name], slot.shape, Region.whole(slot.shape), empty, writer, rank == 0)
