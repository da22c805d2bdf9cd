"""safetensors files in a new directory, written tensor by tensor, in any order; seen by others when all is there.

Every byte's place is known before the first tensor is, so nobody has to hold more than the one that is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import reject
from ...storage.atomic_directory import Draft, sync
from ...storage.memory_kind import no_room, write_numbers
from .format import CODES, METADATA, Place, header_of
from .sources import INDEX, SINGLE, StrPath

MAX_SHARD_SIZE = 5 * 10**9  # bytes, as Hugging Face's


class Entry(NamedTuple):
    """A tensor that is to be written, apart from its numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_files(
    tensors: Iterable[tuple[Entry, Callable[[], Tensor]]], path: StrPath, max_shard_size: int = MAX_SHARD_SIZE
) -> None:
    """Write ``tensors`` to safetensors files in the new directory ``path``, holding one of them at a time.

    Args:
        tensors: what each is, and a function that returns it, which is called once, in this order.
        path: of a directory that does not exist.
        max_shard_size: bytes of the numbers in one file; a tensor that is larger has a file of its own.

    Raises:
        FileExistsError: there is something at ``path``, or another process is writing it.
        ValueError: names twice, or dtypes that such files cannot hold; all of them at once.
        OSError: the disk is full, say. Whatever is raised, nothing is left behind.

    Example:
        >>> import os
        >>> from tempfile import TemporaryDirectory
        >>> weight = torch.ones(2, 3)
        >>> with TemporaryDirectory() as folder:
        ...     write_files([(Entry("w", weight.dtype, (2, 3)), lambda: weight)], f"{folder}/new")
        ...     os.listdir(f"{folder}/new")
        ['model.safetensors']
    """
    pairs = list(tensors)
    files = NewFiles.begin("write_files", [entry for entry, _ in pairs], path, max_shard_size)
    try:
        for entry, tensor in pairs:
            files.write(entry.name, tensor())
        files.publish()
    except BaseException:
        files.abandon()
        raise


class Sink(Protocol):
    """Where tensors go: :class:`NewFiles` on the rank that writes, :class:`Nowhere` on the others."""

    def write(self, name: str, x: Tensor) -> None: ...
    def publish(self) -> None: ...
    def abandon(self) -> None: ...


class Nowhere:
    def write(self, name: str, x: Tensor) -> None:
        """Another rank writes it."""

    def publish(self) -> None:
        """Another rank does."""

    def abandon(self) -> None:
        """There is nothing here."""


@dataclass(frozen=True)
class NewFiles:
    """Files under way, in a draft; :meth:`publish` gives it its name."""

    verb: str
    draft: Draft
    places: Mapping[str, Place]
    _missing: set[str] = field(default_factory=set)

    @staticmethod
    def begin(verb: str, entries: Sequence[Entry], path: StrPath, max_shard_size: int) -> NewFiles:
        """Headers without numbers yet."""
        _check(verb, entries, max_shard_size)
        draft = Draft(Path(path).absolute())
        try:
            draft.open()
            places = _start_files(draft.folder, _split(entries, max_shard_size))
        except BaseException:
            draft.abandon()
            raise
        return NewFiles(verb, draft, places, set(places))

    def write(self, name: str, x: Tensor) -> None:
        """Put the numbers of ``x`` where they belong."""
        place = self.places[name]
        if (tuple(x.shape), x.dtype) != (place.shape, place.dtype):
            expected = f"{place.shape}, {place.dtype}"
            raise ValueError(f"{self.verb}: {name!r}: got shape {tuple(x.shape)}, {x.dtype}, expected {expected}")
        try:
            with open(place.file, "r+b", buffering=0) as file:
                file.seek(place.start)
                write_numbers(file, x)
        except OSError as error:
            raise no_room(error, self.draft.target.parent, place.nbytes, f"{self.verb}: {name!r}") from error
        self._missing.discard(name)

    def publish(self) -> None:
        """Make everything durable, and then visible at once."""
        if self._missing:
            raise ValueError(f"{self.verb}: not written: {', '.join(map(repr, sorted(self._missing)))}")
        for file in self.draft.folder.iterdir():
            sync(file)
        self.draft.publish()

    def abandon(self) -> None:
        """Leave nothing behind; without effect on what is published."""
        self.draft.abandon()


def _check(verb: str, entries: Sequence[Entry], max_shard_size: int) -> None:
    problems = []
    if not isinstance(max_shard_size, int) or isinstance(max_shard_size, bool) or max_shard_size < 1:
        problems.append(f"max_shard_size: got {max_shard_size!r}, expected a number of bytes, 1 or more")
    seen = {METADATA}
    for name, dtype, _ in entries:
        if dtype not in CODES:
            problems.append(f"{name!r}: {dtype}, which safetensors files cannot hold")
        if name in seen:
            problems.append(
                f"{name!r}: {'the name of the metadata' if name == METADATA else 'the name of two tensors'}"
            )
        seen.add(name)
    reject(verb, problems, "Nothing was written.")


def _split(entries: Sequence[Entry], max_shard_size: int) -> list[list[Entry]]:
    """Entries file by file, each file full before the next; inside, the widest numbers first: so all lie aligned."""
    files: list[list[Entry]] = [[]]
    room = max_shard_size
    for entry in entries:
        if entry.nbytes > room and files[-1]:
            files.append([])
            room = max_shard_size
        files[-1].append(entry)
        room -= entry.nbytes
    return [sorted(file, key=lambda entry: -entry.dtype.itemsize) for file in files]


def _start_files(folder: Path, files: Sequence[Sequence[Entry]]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for number, entries in enumerate(files, 1):
        single = len(files) == 1
        path = folder / (SINGLE if single else f"model-{number:05}-of-{len(files):05}.safetensors")
        header = header_of(entries)
        path.write_bytes(header)
        start = len(header)
        for entry in entries:
            places[entry.name] = Place(path, CODES[entry.dtype], entry.shape, start, entry.nbytes)
            start += entry.nbytes
    if len(files) > 1:
        total = sum(place.nbytes for place in places.values())
        weights = {name: places[name].file.name for name in sorted(places)}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2, ensure_ascii=False)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")
    return places
