"""Loads a checkpoint into a tree of any layout: each rank reads the values that contain elements of its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import hints, reject
from ..layout.buffers import Slot
from ..layout.trees import Sharded
from ..mesh.mesh import Mesh
from ..torch_internals.transforms import in_transform
from .chunks import LocalChunk, aliases_of, chunks_of, is_number
from .dcp.metadata import Entry, Value
from .dcp.reader import Reader
from .names import Leaf, dotted, leaves_of, tensor_problem, tensors_of, with_values

_FITS = (
    "Load into a tree of the same model, for example of shard(model, layout) and opt.init(params), without what is not "
    "in the checkpoint. python -m functorch_shard inspect lists what is."
)


class _Part(NamedTuple):
    """Elements of one value in a file, and the memory to copy them to."""

    target: Tensor
    source: tuple[slice, ...]


@dataclass
class Loading:
    """A tree with memory to load into, and the values in files that fill it."""

    reader: Reader
    like: Any
    participants: Mesh
    guess: Callable[[str], str]  # a similar name in the checkpoint
    leaves: Sequence[Leaf] = ()  # of the tree that is returned
    parts: dict[tuple[str, Value], list[_Part]] = field(default_factory=dict)

    @staticmethod
    def of(path: Path, like: Any, participants: Mesh, donate: bool) -> Loading:
        """Open the files, compare them with ``like``, and allocate memory; read no values."""
        if in_transform():
            raise RuntimeError("load: inside a transform or spmd, where a tree is one rank's. Call it outside.")
        reader, wanted = Reader.open(path), leaves_of(like)
        loading = Loading(reader, like, participants, hints(reader.entries))
        reject(f"load: {path}", [*loading._misfits(wanted, donate)], _FITS)
        with torch.inference_mode(False), torch.no_grad():  # in any mode, what is loaded can be trained
            loading.leaves = [loading._made(leaf, donate) for leaf in wanted]
            problems = [problem for leaf in loading.leaves for problem in loading._places(leaf)]
        reject(f"load: {path}", problems, "The checkpoint is incomplete.", RuntimeError)
        return loading

    def lines(self) -> list[str]:
        """Lines that have to be equal on all ranks."""
        return [str(self.reader.folder), self.reader.digest, *(dotted(leaf.path()) for leaf in self.leaves)]

    def read(self) -> list[Any]:
        """Fill the memory, file by file, and return the values of all leaves."""
        with torch.inference_mode(False), torch.no_grad():
            for (name, value), parts in sorted(self.parts.items(), key=lambda x: (x[0][1].file, x[0][1].start)):
                x = self.reader.tensor(name, value)
                for target, source in parts:
                    target.copy_(x[source])
            return [self._finished(leaf) for leaf in self.leaves]

    def tree(self, values: Sequence[Any]) -> Any:
        return with_values(self.like, iter(values))

    def _entry(self, leaf: Leaf, name: str) -> tuple[str, Entry | None]:
        """The entry of a parameter, under any of its names, and that name."""
        paths = (leaf.path(name), *aliases_of(leaf, name))
        found = next((dotted(path) for path in paths if dotted(path) in self.reader.entries), dotted(paths[0]))
        return found, self.reader.entries.get(found)

    def _misfits(self, leaves: Sequence[Leaf], donate: bool) -> Iterator[str]:
        for leaf in leaves:
            x = leaf.value
            if isinstance(x, Sharded):
                for key, shard in x.items():
                    yield from self._buffer_misfits(leaf, key, shard)
            else:
                name = dotted(leaf.path())
                form = (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else (None, None)
                yield from self._misfit(name, self.reader.entries.get(name), *form)
            problems = [_memory_problem(t, donate) for t in tensors_of(x)]
            yield from (f"{dotted(leaf.path())}: {problem}" for problem in problems if problem)

    def _buffer_misfits(self, leaf: Leaf, key: str, shard: Any) -> Iterator[str]:
        layout = leaf.value.layout
        slots = layout.buffers[key].slots
        if shard is None:
            yield from self._misfits_of_none(leaf, key)
            return
        for slot in slots:
            name, entry = self._entry(leaf, slot.name)
            shape = _shape(slot)
            if not isinstance(shard, Tensor):
                yield from self._misfit(name, entry, None, None)
            else:
                yield from self._misfit(name, entry, () if is_number(shard, layout) else shape, shard.dtype)

    def _misfits_of_none(self, leaf: Leaf, key: str) -> Iterator[str]:
        """The checkpoint has nothing for a buffer, or for all of its parameters: numbers, or tensors of one dtype."""
        entries = self._entries_of(leaf, key)
        if lacking := [name for name, entry in entries.items() if entry is None]:
            if len(lacking) < len(entries):
                yield f"{dotted(leaf.path())}: of buffer {key!r}, only some parameters have one: missing for {lacking}"
        elif len({entry.dtype for entry in entries.values() if entry}) > 1 or not (
            _are_shards(leaf, entries) or all(entry and entry.shape == () for entry in entries.values())
        ):
            found = ", ".join(f"{name!r}: {entry}" for name, entry in entries.items())
            shapes = {name: _shape(leaf.value.layout.slots[name]) for name in entries}
            yield f"{dotted(leaf.path())}: of buffer {key!r}: the checkpoint has {found}; expected shapes {shapes}"

    def _entries_of(self, leaf: Leaf, key: str) -> dict[str, Entry | None]:
        """The entries of a buffer's parameters."""
        slots = leaf.value.layout.buffers[key].slots
        return {slot.name: self._entry(leaf, slot.name)[1] for slot in slots}

    def _misfit(self, name: str, entry: Entry | None, shape: Any, dtype: torch.dtype | None) -> Iterator[str]:
        if entry is None:
            yield f"{name!r}: not in the checkpoint{self.guess(name)}"
        elif dtype is None and entry.dtype is not None:
            yield f"{name!r}: got a plain value, the checkpoint has a tensor of {entry}"
        elif dtype is not None and (entry.dtype is None or (entry.shape, entry.dtype) != (shape, dtype)):
            yield f"{name!r}: got shape {shape}, {dtype}, the checkpoint has {entry}"

    def _made(self, leaf: Leaf, donate: bool) -> Leaf:
        """The same leaf with new memory, or with that of ``like``."""
        x, device = leaf.value, self.participants.device

        def own(t: Tensor) -> Tensor:
            return t if donate else torch.zeros_like(t, device=device) if t.is_meta else t.detach().clone()  # padding

        if isinstance(x, Sharded):
            made = {key: self._made_buffer(leaf, key, t, own) for key, t in x.items()}
            return leaf._replace(value=Sharded(made, x.layout))
        return leaf._replace(value=own(x)) if isinstance(x, Tensor) else leaf

    def _made_buffer(self, leaf: Leaf, key: str, x: Any, own: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(x, Tensor):
            return own(x)
        layout = leaf.value.layout
        entries = self._entries_of(leaf, key)
        entry = next(iter(entries.values()))
        if x is not None or entry is None or entry.dtype is None:
            return x
        dims = tuple(layout.mesh.axes.values()) if layout.mesh.is_simulated else ()
        sizes = (*dims, layout.buffers[key].shard_numel) if _are_shards(leaf, entries) else dims
        return torch.zeros(sizes, dtype=entry.dtype, device=layout.mesh.device)

    def _places(self, leaf: Leaf) -> Iterator[str]:
        """Record the source of each element of a shard or a tensor; yield what has none."""
        x = leaf.value
        if isinstance(x, Sharded):
            shards = {key: t for key, t in x.items() if isinstance(t, Tensor) and not is_number(t, x.layout)}
            leaf = leaf._replace(value=Sharded(shards, x.layout))
        for chunk in chunks_of(leaf, self.participants):
            yield from self._place(chunk)

    def _place(self, chunk: LocalChunk) -> Iterator[str]:
        names = [dotted(path) for path in (chunk.path, *chunk.aliases)]
        name = next(name for name in names if name in self.reader.entries)
        missing = chunk.region.numel
        for value in self.reader.entries[name].values:
            if both := chunk.region.overlap(value.region):
                part = _Part(chunk.values[both.inside(chunk.region).index], both.inside(value.region).index)
                self.parts.setdefault((name, value), []).append(part)
                missing -= both.numel
        if missing:
            yield f"{name!r}: {missing} elements of {chunk.region} are in no file"

    def _finished(self, leaf: Leaf) -> Any:
        x = leaf.value
        if isinstance(x, Sharded):
            return Sharded({key: self._finished_buffer(leaf, key, t) for key, t in x.items()}, x.layout)
        return x if isinstance(x, Tensor) else self.reader.plain(dotted(leaf.path()))

    def _finished_buffer(self, leaf: Leaf, key: str, x: Any) -> Any:
        """Return a shard, which is read already, or read the number that all parameters of the buffer have."""
        layout = leaf.value.layout
        entries = [self._entry(leaf, slot.name) for slot in layout.buffers[key].slots]
        if (isinstance(x, Tensor) and not is_number(x, layout)) or not all(entry for _, entry in entries):
            return x
        found = {name: self._number(name, entry) for name, entry in entries if entry}
        advice = (
            "A buffer has one number, for example a step count, for all of its parameters. Plan separate buffers "
            "for parameters whose numbers differ: plan(labels=...)."
        )
        differ = [f"{dotted(leaf.path())}: of buffer {key!r}: {found}"] * (len({*map(str, found.values())}) > 1)
        reject("load: numbers that differ", differ, advice)
        number = next(iter(found.values()))
        return x.fill_(number) if isinstance(x, Tensor) else number

    def _number(self, name: str, entry: Entry) -> Any:
        """Read a number; any other value could have a text without end, and no other one is compared."""
        x = self.reader.whole(name).item() if entry.dtype else self.reader.plain(name)
        is_one = isinstance(x, (bool, int, float, complex, type(None)))
        reject("load: numbers", [] if is_one else [f"{name!r}: got a {type(x).__name__}"], _FITS)
        return x


def _memory_problem(x: Tensor, donate: bool) -> str:
    """Why there is no memory like that of ``x`` to load into, or none of ``x`` itself; empty if there is."""
    if x.is_meta:
        return "on the meta device: it has no memory to load into" if donate else ""
    if donate and x.is_inference():
        return "made in torch.inference_mode, whose tensors are not written to outside of it: load without donate"
    return tensor_problem(x)


def _shape(slot: Slot) -> tuple[int, ...]:
    return slot.dtensor.shape if slot.dtensor else slot.shape


def _are_shards(leaf: Leaf, entries: Mapping[str, Entry | None]) -> bool:
    """Whether the entries have the parameters' shapes. Scalars alone could also be numbers; they count as shards."""
    return all(entry and entry.shape == _shape(leaf.value.layout.slots[name]) for name, entry in entries.items())
