"""Loads a checkpoint into a tree of any layout: each rank reads the values that contain elements of its shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import hints, reject
from ..layout.buffers import Buffer, Slot
from ..layout.layout import Layout
from ..layout.trees import Sharded, is_number
from ..mesh.mesh import Mesh
from ..torch_internals.autograd import in_transform
from .chunks import Chunk, chunks_of
from .format import Entry, Value
from .names import Leaf, dotted, leaves_of, tensor_problem, tensors_of, with_values
from .reader import Reader

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
    leaves: Sequence[Leaf] = ()  # of the tree that is returned
    parts: dict[tuple[str, Value], list[_Part]] = field(default_factory=dict)

    @staticmethod
    def of(path: Path, like: Any, participants: Mesh, donate: bool) -> Loading:
        """Open the files, compare them with ``like``, and allocate memory; read no values."""
        if in_transform():
            raise RuntimeError("load: inside a transform or spmd, where a tree is one rank's. Call it outside.")
        reader, given = Reader.open(path), leaves_of(like)
        loading = Loading(reader, like, participants)
        wanted, guess = [loading._with_templates(leaf) for leaf in given], hints(reader.entries)
        problems = [
            f"{name!r}: {text or f'not in the checkpoint{guess(name)}'}"
            for leaf in wanted
            for name, text in loading._misfits(leaf)
        ]
        memory = [(leaf, _memory_problem(x, donate)) for leaf in given for x in tensors_of(leaf.value)]
        problems += [f"{dotted(leaf.path())}: {problem}" for leaf, problem in memory if problem]
        reject(f"load: {path}", problems, _FITS)
        with torch.inference_mode(False), torch.no_grad():  # in any mode, what is loaded can be trained
            loading.leaves = [leaf._replace(value=loading._memory(leaf.value, donate)) for leaf in wanted]
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

    def _entries(self, leaf: Leaf, buffer: Buffer) -> Iterator[tuple[Slot, str, Entry | None]]:
        """The parameters of a buffer, each with the one of its names that the checkpoint has, and its entry."""
        for slot in buffer.slots:
            names = [dotted(path) for path in leaf.paths(slot.name)]
            name = next((name for name in names if name in self.reader.entries), names[0])
            yield slot, name, self.reader.entries.get(name)

    def _with_templates(self, leaf: Leaf) -> Leaf:
        """Replace ``None`` in a ``Sharded`` by what the checkpoint has: a shard, a number, or nothing."""
        tree = leaf.value
        if not isinstance(tree, Sharded):
            return leaf
        made = {key: self._template(leaf, tree.layout.buffers[key]) if x is None else x for key, x in tree.items()}
        return leaf._replace(value=Sharded(made, tree.layout))

    def _template(self, leaf: Leaf, buffer: Buffer) -> Any:
        found = [(slot, entry) for slot, _, entry in self._entries(leaf, buffer) if entry]
        if not found or found[0][1].dtype is None:
            return 0 if found else None
        mesh = leaf.value.layout.mesh
        dims = tuple(mesh.axes.values()) if mesh.is_simulated else ()
        # Scalars only could be numbers or shards; they count as shards.
        numbers = all(entry.shape == () for _, entry in found) and any(_shape(slot) for slot, _ in found)
        sizes = dims if numbers else (*dims, buffer.shard_numel)
        return torch.empty(sizes, dtype=found[0][1].dtype, device="meta")

    def _misfits(self, leaf: Leaf) -> Iterator[tuple[str, str]]:
        """Names whose entry is of another form, and what it is; without a text, those that have no entry."""
        x = leaf.value
        if not isinstance(x, Sharded):
            name = dotted(leaf.path())
            yield from _misfit(name, self.reader.entries.get(name), x, tuple(x.shape) if isinstance(x, Tensor) else ())
            return
        for key, shard in x.items():
            number = isinstance(shard, Tensor) and is_number(shard, x.layout)
            for slot, name, entry in self._entries(leaf, x.layout.buffers[key]) if shard is not None else ():
                yield from _misfit(name, entry, shard, () if number else _shape(slot))

    def _memory(self, x: Any, donate: bool) -> Any:
        """New memory with the values of ``x``, which padding keeps; or its own."""
        if isinstance(x, Sharded):
            return Sharded({key: self._memory(shard, donate) for key, shard in x.items()}, x.layout)
        if not isinstance(x, Tensor):
            return x
        if x.is_meta:
            return torch.zeros_like(x, device=self.participants.device)
        return x if donate else x.detach().clone()

    def _places(self, leaf: Leaf) -> Iterator[str]:
        """Record the source of each element of a shard or a tensor; yield what has none."""
        x = leaf.value
        if isinstance(x, Sharded):
            shards = {key: t for key, t in x.items() if isinstance(t, Tensor) and not is_number(t, x.layout)}
            leaf = leaf._replace(value=Sharded(shards, x.layout))
        for chunk in chunks_of(leaf, self.participants):
            yield from self._place(chunk)

    def _place(self, chunk: Chunk) -> Iterator[str]:
        name = next(name for name in map(dotted, chunk.paths) if name in self.reader.entries)
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
        if not isinstance(x, Sharded):
            return x if isinstance(x, Tensor) else self.reader.plain(dotted(leaf.path()))
        return Sharded({key: self._finished_buffer(leaf, key, x.layout) for key in x}, x.layout)

    def _finished_buffer(self, leaf: Leaf, key: str, layout: Layout) -> Any:
        """Return a shard, which is read already, or read the number that all parameters of the buffer have."""
        x = leaf.value[key]
        if x is None or (isinstance(x, Tensor) and not is_number(x, layout)):
            return x
        found = {name: self._number(name, entry) for _, name, entry in self._entries(leaf, layout.buffers[key])}
        advice = (
            "A buffer has one number, for example a step count, for all of its parameters. Plan separate buffers "
            "for parameters whose numbers differ: plan(labels=...)."
        )
        differ = [f"{dotted(leaf.path())}: of buffer {key!r}: {found}"] * (len({*map(str, found.values())}) > 1)
        reject("load: numbers that differ", differ, advice)
        number = next(iter(found.values()))
        return x.fill_(number) if isinstance(x, Tensor) else number

    def _number(self, name: str, entry: Entry | None) -> Any:
        """Read a number; any other value could have a text without end, and no other one is compared."""
        x = self.reader.whole(name).item() if entry and entry.dtype else self.reader.plain(name)
        is_one = isinstance(x, (bool, int, float, complex, type(None)))
        reject("load: numbers", [] if is_one else [f"{name!r}: got a {type(x).__name__}"], _FITS)
        return x


def _misfit(name: str, entry: Entry | None, x: Any, shape: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    if entry is None:
        yield name, ""
    elif not isinstance(x, Tensor) and entry.dtype is not None:
        yield name, f"got a plain value, the checkpoint has a tensor of {entry}"
    elif isinstance(x, Tensor) and (entry.shape, entry.dtype) != (shape, x.dtype):
        yield name, f"got shape {shape}, {x.dtype}, the checkpoint has {entry}"


def _memory_problem(x: Tensor, donate: bool) -> str:
    """Why there is no memory like that of ``x`` to load into, or none of ``x`` itself; empty if there is."""
    if x.is_meta:
        return "on the meta device: it has no memory to load into" if donate else ""
    if donate and x.is_inference():
        return "made in torch.inference_mode, whose tensors are not written to outside of it: load without donate"
    return tensor_problem(x)


def _shape(slot: Slot) -> tuple[int, ...]:
    return slot.dtensor.shape if slot.dtensor else slot.shape
