"""Loads files into a tree of any layout: each rank reads the values that contain elements of its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..collectives.sinks import refuse_derivatives
from ..errors import reject
from ..layout.buffers import Slot
from ..layout.trees import participants_of
from ..mesh.mesh import Mesh
from .format import Entry, dotted
from .leaves import Leaf, chunks_of, leaves_of, with_values
from .reader import Reader
from .saving import SAME

_FITS = (
    "Load into a tree of the same model, for example of shard(model, layout) and opt.init(params), without what is not "
    "in the checkpoint. python -m functorch_shard inspect lists what is."
)


def load_into(verb: str, like: Any, open_files: Callable[[], Reader], donate: bool = False) -> Any:
    """Read files into a tree like ``like``; every rank raises if one does."""
    participants = participants_of(like)

    def begin() -> tuple[Reader, list[Leaf]]:
        refuse_derivatives(verb)
        reader = open_files()
        return reader, _allocated(verb, reader, leaves_of(like), participants.device, donate)

    with torch.inference_mode(False), torch.no_grad():  # in any mode, what is loaded can be trained
        reader, leaves = participants.agree(verb, begin, lambda made: [made[0].identity, *map(str, made[1])], SAME)
        values = participants.agree(verb, lambda: _read(reader, leaves, participants), lambda _: [])
        return with_values(like, iter(values))


def _allocated(verb: str, reader: Reader, given: Sequence[Leaf], device: torch.device, donate: bool) -> list[Leaf]:
    """Compare the files with a tree, and return its leaves with memory to load into; read no values."""
    wanted = [_with_template(leaf, reader) for leaf in given]
    problems = [
        f"{name!r}: {f'got {got}, the checkpoint has {entry}' if entry else 'not in the checkpoint'}"
        for leaf in wanted
        if leaf.tensor is not None or leaf.is_plain
        for slot, name, entry in _entries(leaf, reader)
        if (got := _misfit(leaf, slot, entry, reader.casts))
    ]
    reject(f"{verb}: {reader.folder}", problems, _FITS)
    for i, leaf in enumerate(wanted):
        x = leaf.tensor
        if x is not None and (x.is_meta or not donate):
            memory = torch.zeros_like(x, device=device) if x.is_meta else x.detach().clone()  # padding keeps values
            wanted[i] = leaf._replace(value=memory)
    return wanted


def _read(reader: Reader, leaves: Sequence[Leaf], participants: Mesh) -> list[Any]:
    """Fill the memory, and return the values of all leaves."""
    tensors = [leaf for leaf in leaves if leaf.tensor is not None and not leaf.is_number]
    chunks = [(chunk, map(dotted, chunk.paths)) for leaf in tensors for chunk in chunks_of(leaf, participants)]
    named = ((next(name for name in names if name in reader.entries), chunk) for chunk, names in chunks)
    reader.read((name, chunk.region, chunk.values) for name, chunk in named)
    return [_finished(leaf, reader) for leaf in leaves]


def _finished(leaf: Leaf, reader: Reader) -> Any:
    """Return a tensor, which is read already, or read a plain value or a number, which a buffer has once."""
    if not leaf.buffer and leaf.is_plain:
        return reader.plain(str(leaf))
    if not leaf.is_plain and not leaf.is_number:
        return leaf.value
    entries = [(name, entry) for _, name, entry in _entries(leaf, reader)]
    found = {name: reader.whole(name).item() if e and e.dtype else reader.plain(name) for name, e in entries}
    advice = "A buffer has one number, for example a step count. Plan buffers for parameters that differ: labels=."
    reject("load: numbers that differ", [f"{leaf}: {found}"] * (len({*map(str, found.values())}) > 1), advice)
    number = next(iter(found.values()))
    return leaf.tensor.fill_(number) if leaf.tensor is not None else number


def _entries(leaf: Leaf, reader: Reader) -> Iterator[tuple[Slot | None, str, Entry | None]]:
    """The parameters of a leaf, each with the one of its names that the files have, and its entry."""
    for slot, names in leaf.parameters():
        name = next((name for name in names if name in reader.entries), names[0])
        yield slot, name, reader.entries.get(name)


def _with_template(leaf: Leaf, reader: Reader) -> Leaf:
    """Replace what a gradient has not made yet by what the checkpoint has: a shard, a number, or nothing."""
    found = [(slot, entry) for slot, _, entry in _entries(leaf, reader) if slot and entry]
    if leaf.value is not None or not leaf.layout or not leaf.buffer or not found:
        return leaf
    dtype, mesh = found[0][1].dtype, leaf.layout.mesh
    if dtype is None:
        return leaf._replace(value=0)
    dims = tuple(mesh.axes.values()) if mesh.is_simulated else ()
    # Scalars only could be numbers or shards; they count as shards.
    numbers = all(entry.shape == () for _, entry in found) and any(slot.shape for slot, _ in found)
    sizes = dims if numbers else (*dims, leaf.buffer.shard_numel)
    return leaf._replace(value=torch.empty(sizes, dtype=dtype, device="meta"))


def _misfit(leaf: Leaf, slot: Slot | None, entry: Entry | None, casts: bool) -> str:
    """What the tree has, if it is of another form than the entry."""
    x, form = leaf.tensor, slot and (slot.dtensor or slot)
    if x is None:
        return "a plain value" if entry is None or entry.dtype is not None else ""
    shape = tuple(x.shape) if form is None else () if leaf.shard is None else form.shape
    dtype = entry.dtype if entry and entry.shape == shape else None
    if dtype and (dtype == x.dtype or (casts and dtype.is_floating_point and x.dtype.is_floating_point)):
        return ""
    return f"shape {shape}, {x.dtype}"
