"""Writes safetensors files to a new directory, tensor by tensor in any order; it becomes visible when complete.

All offsets are computed first, so only the tensor that is being written is in memory.
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
from ...storage.atomic_directory import StagingDirectory, local_path, sync
from ...storage.memory_kind import disk_full, write_numbers
from .format import CODES, METADATA, Place, header_of
from .sources import INDEX, SINGLE, StrPath

MAX_SHARD_SIZE = 5 * 10**9  # bytes, as Hugging Face's


class Entry(NamedTuple):
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_files(
    tensors: Iterable[tuple[Entry, Callable[[], Tensor]]], path: StrPath, max_shard_size: int = MAX_SHARD_SIZE
) -> None:
    """Write ``tensors`` to safetensors files in the new directory ``path``, one at a time.

    Args:
        tensors: the entry of each, and a function that returns it, which is called once, in this order.
        path: of a directory that does not exist.
        max_shard_size: bytes of tensors in one file; a larger tensor has a file of its own.

    Raises:
        FileExistsError: ``path`` exists, or another process is writing it.
        ValueError: duplicate names, or dtypes that the format does not have; all of them at once.
        OSError: for example a full disk. After any error, nothing is left.

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
    """The destination of tensors: :class:`NewFiles` on the rank that writes, :class:`Nowhere` on the others."""

    def write(self, name: str, x: Tensor) -> None: ...
    def publish(self) -> None: ...
    def abandon(self) -> None: ...


class Nowhere:
    """Writes nothing: another rank does."""

    def write(self, name: str, x: Tensor) -> None:
        pass

    def publish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


@dataclass(frozen=True)
class NewFiles:
    """Files in a staging directory; :meth:`publish` makes them visible."""

    verb: str
    staging: StagingDirectory
    places: Mapping[str, Place]
    _missing: set[str] = field(default_factory=set)

    @staticmethod
    def begin(verb: str, entries: Sequence[Entry], path: StrPath, max_shard_size: int) -> NewFiles:
        """Validate ``entries``, and write the headers."""
        _check(verb, entries, max_shard_size)
        staging = StagingDirectory(local_path(f"{verb}: path", path))
        try:
            staging.open()
            places = _start_files(staging.folder, _split(entries, max_shard_size))
        except BaseException:
            staging.abandon()
            raise
        return NewFiles(verb, staging, places, set(places))

    def write(self, name: str, x: Tensor) -> None:
        """Write the data of ``x`` to its place."""
        place = self.places[name]
        if (tuple(x.shape), x.dtype) != (place.shape, place.dtype):
            expected = f"{place.shape}, {place.dtype}"
            raise ValueError(f"{self.verb}: {name!r}: got shape {tuple(x.shape)}, {x.dtype}, expected {expected}")
        try:
            with open(place.file, "r+b", buffering=0) as file:
                file.seek(place.start)
                write_numbers(file, x)
        except OSError as error:
            raise disk_full(error, self.staging.target.parent, place.nbytes, f"{self.verb}: {name!r}") from error
        self._missing.discard(name)

    def publish(self) -> None:
        """Sync all files to the disk, then make the directory visible."""
        if self._missing:
            raise ValueError(f"{self.verb}: not written: {', '.join(map(repr, sorted(self._missing)))}")
        for file in self.staging.folder.iterdir():
            sync(file)
        self.staging.publish()

    def abandon(self) -> None:
        """Remove the files, unless they are published."""
        self.staging.abandon()


def _check(verb: str, entries: Sequence[Entry], max_shard_size: int) -> None:
    problems = []
    if not isinstance(max_shard_size, int) or isinstance(max_shard_size, bool) or max_shard_size < 1:
        problems.append(f"max_shard_size: got {max_shard_size!r}, expected an int of bytes, 1 or more")
    seen = {METADATA}
    for name, dtype, _ in entries:
        if dtype not in CODES:
            problems.append(f"{name!r}: {dtype}, which safetensors does not have")
        if name in seen:
            what = "the name of the metadata" if name == METADATA else "the name of two tensors"
            problems.append(f"{name!r}: {what}")
        seen.add(name)
    reject(verb, problems, "Nothing was written.")


def _split(entries: Sequence[Entry], max_shard_size: int) -> list[list[Entry]]:
    """Distribute entries over files, in order; within a file, the widest dtypes come first, which aligns all data."""
    files: list[list[Entry]] = [[]]
    free = max_shard_size
    for entry in entries:
        if entry.nbytes > free and files[-1]:
            files.append([])
            free = max_shard_size
        files[-1].append(entry)
        free -= entry.nbytes
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
