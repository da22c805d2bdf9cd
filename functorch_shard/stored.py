"""Checkpoints on disk, in the format of ``torch.distributed.checkpoint``: nothing that is read is ever executed.

Note [Files]: ``__<rank>_0.distcp`` has the values that a rank wrote, each as ``torch.save`` writes it, one after the
other. ``.metadata``, a pickle, says which box of which tensor lies where. Both are torch's own. Beside them,
``functorch_shard.json`` has the length of each file and a checksum of each value, and its first line is a digest of
the rest; a checkpoint that another program wrote has none, and is checked by its structure alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any

import torch
from torch import Tensor

from .boxes import Box
from .errors import reject
from .metadata import Entry, Value, entries_of, metadata_of
from .naming import Path as TreePath
from .pieces import SCALAR

METADATA, MANIFEST = ".metadata", "functorch_shard.json"
_FORMAT = 1
_ALTERED = (
    "The files were altered since they were written. Load another checkpoint: latest(path, verify=True) finds it."
)


@dataclass(frozen=True)
class Stored:
    """A checkpoint that is whole, as far as names, places and lengths tell; ``order`` counts those of a directory."""

    folder: Path
    entries: Mapping[str, Entry]
    checks: Mapping[tuple[str, int], int]
    order: int
    digest: str

    @staticmethod
    def open(folder: Path) -> Stored:
        """Read what the files say of themselves, and no values.

        Raises:
            FileNotFoundError: there is no checkpoint.
            RuntimeError: files are missing, damaged, or lead elsewhere; all of them at once.
        """
        if not (folder / METADATA).is_file() and not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"{folder}: no checkpoint: there is no {METADATA}")
        lengths = _lengths(folder)
        manifest = _read_manifest(folder, lengths)
        raw = _read_plain(folder, METADATA, lengths)
        digest = hashlib.sha256(raw).hexdigest()
        if manifest:
            damaged = [f"{METADATA}: its checksum differs"] if digest != manifest["metadata"] else []
            damaged += _length_problems(lengths, manifest["files"])
            reject(f"{folder}: damaged", damaged, _ALTERED, RuntimeError)
        try:
            entries = entries_of(raw)
        except RuntimeError as error:
            raise RuntimeError(f"{folder / METADATA}: {error}") from error
        reject(f"{folder}: damaged", _place_problems(entries, lengths), _ALTERED, RuntimeError)
        checks = {(file, start): crc for file, rows in manifest.get("checks", {}).items() for start, _, crc in rows}
        return Stored(folder, entries, checks, manifest.get("order", 0), manifest.get("digest", digest))

    def tensor(self, name: str, value: Value) -> Tensor:
        """One box of the tensor ``name``, on the CPU; no other bytes are read."""
        entry, x = self.entries[name], self._value(name, value)
        if not isinstance(x, Tensor) or (x.shape, x.dtype) != (value.box.sizes, entry.dtype):
            what = f"shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise RuntimeError(
                f"{self.folder / value.file}: {name!r}: {what} at byte {value.start}, expected shape "
                f"{value.box.sizes}, {entry.dtype}. {_ALTERED}"
            )
        return x

    def whole(self, name: str) -> Tensor:
        """All of the tensor ``name``, put together on the CPU."""
        entry = self.entries[name]
        missing = prod(entry.shape) - sum(value.box.numel for value in entry.values)
        reject(
            f"{self.folder}: {name!r}", [f"{missing} elements are in no file"] * (missing > 0), _ALTERED, RuntimeError
        )
        x = torch.empty(entry.shape, dtype=entry.dtype)
        for value in entry.values:
            x[value.box.index] = self.tensor(name, value)
        return x

    def plain(self, name: str) -> Any:
        """The plain value ``name``."""
        return self._value(name, self.entries[name].values[0])

    def damage(self) -> list[str]:
        """What is wrong with the values themselves: every byte is read."""
        problems = []
        for name, entry in self.entries.items():
            for value in entry.values:
                try:
                    self._check(name, value)
                except (RuntimeError, OSError) as error:
                    problems.append(str(error))
        return problems

    def _value(self, name: str, value: Value) -> Any:
        self._check(name, value)
        with _open(self.folder / value.file) as file:
            try:
                window: Any = _Window(file, value)
                return torch.load(window, map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, AttributeError) as error:
                raise RuntimeError(
                    f"{self.folder / value.file}: {name!r}: {value.nbytes:,} bytes at {value.start:,} are no plain "
                    f"value and no tensor, and nothing else is loaded ({type(error).__name__}: {error}). {_ALTERED}"
                ) from error

    def _check(self, name: str, value: Value) -> None:
        expected = self.checks.get((value.file, value.start))
        if expected is None:
            return
        with _open(self.folder / value.file) as file:
            file.seek(value.start)
            found, left = 0, value.nbytes
            while left and (part := file.read(min(left, 1 << 20))):
                found, left = zlib.crc32(part, found), left - len(part)
        if found != expected or left:
            raise RuntimeError(
                f"{self.folder / value.file}: {name!r}: the checksum of {value.nbytes:,} bytes at {value.start:,} is "
                f"{found:08x}, expected {expected:08x}. {_ALTERED}"
            )


class Writer:
    """Writes the file of one rank: values one after the other, each with its checksum."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.name = f"__{rank}_0.distcp"
        self.rows: list[dict[str, Any]] = []
        self._file = _Tally((folder / self.name).open("xb"))

    def tensor(
        self, path: TreePath, shape: Sequence[int], box: Box, values: Tensor, aliases: Sequence[TreePath]
    ) -> None:
        # A copy: torch.save writes all of the memory that a view is a part of.
        plain = values.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        plain = plain.resolve_conj().resolve_neg()
        described = {"shape": list(shape), "dtype": str(plain.dtype).removeprefix("torch."), "box": box}
        self._save(plain, {"paths": [path, *aliases], **described})

    def plain(self, path: TreePath, value: Any) -> None:
        self._save(value, {"paths": [path], "shape": [], "dtype": None, "box": SCALAR})

    def close(self) -> None:
        """Leave what was written on the disk itself, with an index for who completes the checkpoint."""
        self._file.close()
        index = {"file": self.name, "nbytes": self._file.total, "rows": self.rows}
        write_durably(_index_file(self._file.folder, self.name), json.dumps(index).encode())

    def abandon(self) -> None:
        self._file.file.close()

    def _save(self, value: Any, row: dict[str, Any]) -> None:
        start = self._file.total
        self._file.crc = 0
        try:
            torch.save(value, self._file)  # pyright: ignore[reportArgumentType]
        except RuntimeError:
            if self._file.error:  # a full disk, which torch says otherwise
                raise self._file.error from None
            raise
        nbytes = self._file.total - start
        self.rows.append({**row, "start": start, "nbytes": nbytes, "crc": self._file.crc})


def complete(folder: Path, ranks: Iterable[int], order: int) -> None:
    """Write what makes the files of all ranks one checkpoint, and take their indices away."""
    files = [_index_file(folder, f"__{rank}_0.distcp") for rank in ranks]
    indices = [json.loads(file.read_text()) for file in files]
    raw = metadata_of(indices)
    write_durably(folder / METADATA, raw)
    checks = {i["file"]: [[row["start"], row["nbytes"], row["crc"]] for row in i["rows"]] for i in indices}
    lengths = {index["file"]: index["nbytes"] for index in indices} | {METADATA: len(raw)}
    digest = hashlib.sha256(raw).hexdigest()
    body = json.dumps({"format": _FORMAT, "order": order, "metadata": digest, "files": lengths, "checks": checks})
    write_durably(folder / MANIFEST, f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}".encode())
    for file in files:
        file.unlink()


def has_index(folder: Path, rank: int) -> bool:
    """Whether a rank has written all of its own."""
    return _index_file(folder, f"__{rank}_0.distcp").exists()


def order_of(folder: Path) -> int | None:
    """Which of a directory's checkpoints this is, by its manifest; None where there is none that can be read."""
    try:
        return int(_read_manifest(folder, _lengths(folder))["order"])
    except (OSError, RuntimeError, KeyError):
        return None


def write_durably(path: Path, data: bytes) -> None:
    """A new file, whole and on the disk itself when this returns."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _index_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.index"


class _Tally:
    """A file that counts its bytes, and sums up those since ``crc`` was 0."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.folder = file, Path(file.name).parent
        self.total = self.crc = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        nbytes = memoryview(data).nbytes
        self.crc, self.total = zlib.crc32(data, self.crc), self.total + nbytes
        return nbytes

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class _Window(io.RawIOBase):
    """The bytes of one value, as a file of their own."""

    def __init__(self, file: IO[bytes], value: Value) -> None:
        self._file, self._start, self._nbytes, self._at = file, value.start, value.nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        self._file.seek(self._start + self._at)
        read = self._file.readinto(memoryview(memory)[: self._nbytes - self._at])  # pyright: ignore[reportAttributeAccessIssue]
        self._at += read
        return read

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at


def _open(path: Path) -> IO[bytes]:
    """A regular file of the folder: never what a link points to."""
    return open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb")


def _lengths(folder: Path) -> dict[str, int]:
    """The bytes of each regular file; -1: it is something else, as a link out of the folder."""
    found = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder)}
    return {name: stat.st_size if S_ISREG(stat.st_mode) else -1 for name, stat in found.items()}


def _length_problems(found: Mapping[str, int], expected: Mapping[str, int]) -> Iterator[str]:
    problems = []
    for name, nbytes in expected.items():
        if name not in found:
            problems.append(f"{name}: missing, expected {nbytes:,} bytes")
        elif found[name] < 0:
            problems.append(f"{name}: no regular file")
        elif found[name] != nbytes:
            problems.append(f"{name}: {found[name]:,} bytes, expected {nbytes:,}")
    return problems  # pyright: ignore[reportReturnType]


def _read_plain(folder: Path, name: str, lengths: Mapping[str, int]) -> bytes:
    what = "missing" if name not in lengths else "no regular file" if lengths[name] < 0 else ""
    reject(f"{folder}: damaged", [f"{name}: {what}"] if what else [], _ALTERED, RuntimeError)
    with _open(folder / name) as file:
        return file.read()


def _read_manifest(folder: Path, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Of a checkpoint that was saved here; empty for one that another program wrote."""
    if MANIFEST not in lengths:
        return {}
    digest, _, body = _read_plain(folder, MANIFEST, lengths).partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise RuntimeError(f"{folder}: damaged: {MANIFEST}: its digest differs. {_ALTERED}")
    manifest = json.loads(body)
    if manifest["format"] != _FORMAT:
        raise RuntimeError(f"{folder}: {MANIFEST}: format {manifest['format']}, this version reads format {_FORMAT}")
    return {**manifest, "digest": digest.decode()}  # of all values, by their checksums


def _place_problems(entries: Mapping[str, Entry], lengths: Mapping[str, int]) -> list[str]:
    problems = {
        f"{value.file}: {_file_problem(value, lengths)} ({name!r})"
        for name, entry in entries.items()
        for value in entry.values
        if _file_problem(value, lengths)
    }
    for name, entry in entries.items():
        for box in (value.box for value in entry.values if entry.dtype is not None):
            ends = [offset + size for offset, size in zip(box.offsets, box.sizes, strict=False)]
            if len(box.sizes) != len(entry.shape) or min((*box.offsets, *box.sizes, 0)) < 0:
                problems.add(f"{name!r}: {box} is no box of shape {entry.shape}")
            elif any(end > size for end, size in zip(ends, entry.shape, strict=True)):
                problems.add(f"{name!r}: {box} is outside of shape {entry.shape}")
    return sorted(problems)


def _file_problem(value: Value, lengths: Mapping[str, int]) -> str:
    if value.file not in lengths:
        return "missing, or not in this folder"
    if lengths[value.file] < 0:
        return "no regular file"
    if value.start < 0 or value.nbytes < 0 or value.start + value.nbytes > lengths[value.file]:
        return f"{lengths[value.file]:,} bytes, expected {value.nbytes:,} at {value.start:,}"
    return ""
