"""How a directory becomes a tree again, of any form: each rank reads the boxes that it has elements of."""

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
from .chunks import Piece, aliases_of, is_number, pieces_of
from .dcp.metadata import Entry, Value
from .dcp.stored import Stored
from .names import Leaf, PerRank, dotted, leaves_of, with_values

_FITS = (
    "Load into a tree of the same parameters, made from the same model, as shard(model, layout) and opt.init(params), "
    "and leave out of it what is not in the checkpoint: python -m functorch_shard inspect lists what is."
)


class _Part(NamedTuple):
    """Elements of one stored value, and where they go."""

    target: Tensor
    source: tuple[slice, ...]


@dataclass
class Loading:
    """A tree with memory for all that is to come, and what comes from where."""

    stored: Stored
    like: Any
    party: Mesh
    guess: Callable[[str], str]  # what a name that is not in the checkpoint may have been meant to be
    leaves: Sequence[Leaf] = ()  # of the tree that is made
    parts: dict[tuple[str, Value], list[_Part]] = field(default_factory=dict)
    numbers: list[tuple[Leaf, str, Mapping[str, Tensor]]] = field(default_factory=list)  # by buffer and name

    @staticmethod
    def of(path: Path, like: Any, party: Mesh, donate: bool) -> Loading:
        """Open the files, compare them with ``like``, and find memory; no values are read."""
        if in_transform():
            raise RuntimeError("load: inside a transform, or inside spmd, where a tree is one rank's. Call it outside.")
        stored, wanted = Stored.open(path), leaves_of(like)
        loading = Loading(stored, like, party, hints(stored.entries))
        reject(f"load: {path}", [*loading._misfits(wanted, donate)], _FITS)
        loading.leaves = [loading._made(leaf, donate) for leaf in wanted]
        problems = [problem for leaf in loading.leaves for problem in loading._places(leaf)]
        reject(f"load: {path}", problems, "The checkpoint is incomplete.", RuntimeError)
        return loading

    def lines(self) -> list[str]:
        """What a difference between ranks is told in."""
        return [str(self.stored.folder), self.stored.digest, *(dotted(leaf.path()) for leaf in self.leaves)]

    def read(self) -> list[Any]:
        """Fill the memory, file after file; plain values are made."""
        with torch.inference_mode(False), torch.no_grad():
            for (name, value), parts in sorted(self.parts.items(), key=lambda x: (x[0][1].file, x[0][1].start)):
                x = self.stored.tensor(name, value)
                for target, source in parts:
                    target.copy_(x[source])
            plain = [dict(self._plain_of_buffers(leaf)) for leaf in self.leaves]
            self._settle_numbers(plain)
        return [self._finished(leaf, found) for leaf, found in zip(self.leaves, plain, strict=True)]

    def tree(self, values: Sequence[Any]) -> Any:
        return with_values(self.like, iter(values))

    def _entry(self, leaf: Leaf, name: str) -> tuple[str, Entry | None]:
        """What is stored of a parameter: under its name, or another of a tied one."""
        paths = (leaf.path(name), *aliases_of(leaf, name))
        found = next((dotted(path) for path in paths if dotted(path) in self.stored.entries), dotted(paths[0]))
        return found, self.stored.entries.get(found)

    def _misfits(self, leaves: Sequence[Leaf], donate: bool) -> Iterator[str]:
        for leaf in leaves:
            x = leaf.value
            if isinstance(x, Sharded):
                for key, shard in x.items():
                    yield from self._buffer_misfits(leaf, key, shard)
            else:
                name = dotted(leaf.path())
                yield from self._misfit(name, self.stored.entries.get(name), *self._form(x))
            if donate and any(t.is_meta for t in _tensors(x)):
                yield f"{dotted(leaf.path())}: on the meta device: there is no memory to load into"

    def _form(self, x: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
        if isinstance(x, PerRank):
            shape = x.tensor.shape[len(self.party.axes) :] if self.party.is_simulated else x.tensor.shape
            return (self.party.size, *shape), x.tensor.dtype
        return (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else (None, None)

    def _buffer_misfits(self, leaf: Leaf, key: str, shard: Any) -> Iterator[str]:
        layout = leaf.value.layout
        slots = layout.buffers[key].slots
        if shard is None:  # what no gradient has made yet: there, or not there, for all of them
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
        """All of a buffer's parameters have to have the same: nothing, a value each, or a shard of one dtype."""
        entries = self._entries_of(leaf, key)
        if lacking := [name for name, entry in entries.items() if entry is None]:
            if len(lacking) < len(entries):
                yield f"{dotted(leaf.path())}: of buffer {key!r}, only some have one: missing for {lacking}"
        elif len({entry.dtype for entry in entries.values() if entry}) > 1 or not _fits_all(leaf, entries):
            found = ", ".join(f"{name!r}: {entry}" for name, entry in entries.items())
            shapes = {name: _shape(leaf.value.layout.slots[name]) for name in entries}
            yield f"{dotted(leaf.path())}: of buffer {key!r}: the checkpoint has {found}; expected shapes {shapes}"

    def _entries_of(self, leaf: Leaf, key: str) -> dict[str, Entry | None]:
        """What is stored of each parameter of a buffer."""
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
        """The same leaf with memory of its own, or with that of ``like``."""
        x, device = leaf.value, self.party.device
        own = (lambda t: t) if donate else (lambda t: _empty_like(t, device))
        if isinstance(x, Sharded):
            made = {key: self._made_buffer(leaf, key, t, own) for key, t in x.items()}
            return leaf._replace(value=Sharded(made, x.layout))
        if isinstance(x, PerRank):
            return leaf._replace(value=PerRank(own(x.tensor)))
        return leaf._replace(value=own(x)) if isinstance(x, Tensor) else leaf

    def _made_buffer(self, leaf: Leaf, key: str, x: Any, own: Any) -> Any:
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
        """Note where each element comes from; tell what comes from nowhere."""
        tree = leaf.value if isinstance(leaf.value, Sharded) else None
        for key, x in tree.items() if tree else ():
            if isinstance(x, Tensor) and is_number(x, leaf.value.layout):
                slots = leaf.value.layout.buffers[key].slots
                self.numbers.append((leaf, key, {slot.name: torch.empty_like(x[(0,) * x.ndim]) for slot in slots}))
        found = {dotted(leaf.path(name)): x for of, _, xs in self.numbers if of is leaf for name, x in xs.items()}
        for piece in pieces_of(leaf, self.party):
            target = found.get(dotted(piece.path), piece.values) if not piece.shape else piece.values
            yield from self._place(piece, target)

    def _place(self, piece: Piece, target: Tensor) -> Iterator[str]:
        names = [dotted(path) for path in (piece.path, *piece.aliases)]
        name = next(name for name in names if name in self.stored.entries)
        missing = piece.box.numel
        for value in self.stored.entries[name].values:
            if both := piece.box.overlap(value.box):
                part = _Part(target[both.inside(piece.box).index], both.inside(value.box).index)
                self.parts.setdefault((name, value), []).append(part)
                missing -= both.numel
        if missing:
            yield f"{name!r}: {missing} elements of {piece.box} are in no file"

    def _settle_numbers(self, plain: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        problems = []
        for leaf, key, found in self.numbers:
            values = {name: x.item() for name, x in found.items()}
            if len({*map(str, values.values())}) > 1:
                problems.append(f"{dotted(leaf.path())}: of buffer {key!r}: {values}")
            leaf.value[key].fill_(next(iter(values.values())))
        for leaf, buffers in zip(self.leaves, plain, strict=True):
            for key, found in buffers.items():
                if len({*map(str, found.values())}) > 1:
                    problems.append(f"{dotted(leaf.path())}: of buffer {key!r}: {found}")
        advice = (
            "A buffer has one number for all of its parameters, as a step count. Keep parameters whose histories "
            "differ in buffers of their own: plan(labels=...)."
        )
        reject("load: numbers that differ", problems, advice)

    def _finished(self, leaf: Leaf, plain: Mapping[str, Mapping[str, Any]]) -> Any:
        x = leaf.value
        if isinstance(x, Sharded):
            return Sharded({**x, **{key: next(iter(found.values())) for key, found in plain.items()}}, x.layout)
        return x if isinstance(x, (Tensor, PerRank)) else self.stored.plain(dotted(leaf.path()))

    def _plain_of_buffers(self, leaf: Leaf) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is no tensor, buffer by buffer and name by name: one value, if the checkpoint fits."""
        for key, x in leaf.value.items() if isinstance(leaf.value, Sharded) else ():
            if not isinstance(x, Tensor):
                names = [self._entry(leaf, slot.name) for slot in leaf.value.layout.buffers[key].slots]
                if all(entry for _, entry in names):
                    yield key, {name: self.stored.plain(name) for name, _ in names}


def _shape(slot: Slot) -> tuple[int, ...]:
    return slot.dtensor.shape if slot.dtensor else slot.shape


def _are_shards(leaf: Leaf, entries: Mapping[str, Entry | None]) -> bool:
    """Whether what is stored has the parameters' shapes. Of scalars alone nobody knows: a shard, as of momentum."""
    return all(entry and entry.shape == _shape(leaf.value.layout.slots[name]) for name, entry in entries.items())


def _fits_all(leaf: Leaf, entries: Mapping[str, Entry | None]) -> bool:
    return _are_shards(leaf, entries) or all(entry and entry.shape == () for entry in entries.values())


def _tensors(x: Any) -> list[Tensor]:
    values = x.values() if isinstance(x, Sharded) else [x.tensor if isinstance(x, PerRank) else x]
    return [t for t in values if isinstance(t, Tensor)]


def _empty_like(x: Tensor, device: torch.device) -> Tensor:
    """Memory to load into: with the padding that ``x`` has, where it has values."""
    return torch.zeros_like(x, device=device) if x.is_meta else x.detach().clone()
