"""Checkpoints on disk, in the format of ``torch.distributed.checkpoint``: nothing that is read is ever executed.

Note [Files]: ``__<rank>_0.distcp`` has the values that a rank wrote, each as ``torch.save`` writes it, one after the
other. ``.metadata``, a pickle, says which box of which tensor lies where. Both are torch's own. Beside them,
``functorch_shard.json`` has the length of each file and a checksum of each value, and its first line is a digest of
the rest; a checkpoint that another program wrote has none, and is checked by its structure alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ...errors import reject, shown
from ..chunks import SCALAR
from ..names import Path as TreePath
from ..regions import Box, first_overlap
from .manifest import ALTERED, FORMAT, MANIFEST, lengths_of, read_manifest, read_plain
from .metadata import Entry, Value, entries_of, metadata_of
from .unpickler import NotPlainError
from .values import parse, read_bytes

METADATA = ".metadata"
# Of a checkpoint without a manifest, nobody knows what it was when it was written.
_UNKNOWN = "The checkpoint is damaged, or was not written as torch.distributed.checkpoint writes it. Load another one."


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
            raise FileNotFoundError(f"{folder}: no checkpoint: {_what_is_there(folder)}")
        lengths = lengths_of(folder)
        manifest = read_manifest(folder, lengths)
        raw = read_plain(folder, METADATA, lengths)
        digest = hashlib.sha256(raw).hexdigest()
        if manifest:
            damaged = [f"{METADATA}: its checksum differs"] if digest != manifest["metadata"] else []
            damaged += _length_problems(lengths, manifest["files"])
            reject(f"{folder}: damaged", damaged, ALTERED, RuntimeError)
        try:
            entries = entries_of(raw)
        except RuntimeError as error:
            raise RuntimeError(f"{folder / METADATA}: {error}") from error
        advice = ALTERED if manifest else _UNKNOWN
        reject(f"{folder}: damaged", _place_problems(entries, lengths), advice, RuntimeError)
        checks = {(file, start): crc for file, rows in manifest.get("checks", {}).items() for start, _, crc in rows}
        return Stored(folder, entries, checks, manifest.get("order", 0), manifest.get("digest", digest))

    def tensor(self, name: str, value: Value) -> Tensor:
        """One box of the tensor ``name``, on the CPU; no other bytes are read."""
        entry, x = self.entries[name], self._value(name, value)
        if not isinstance(x, Tensor) or (x.shape, x.dtype) != (value.box.sizes, entry.dtype):
            what = f"shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise self._damaged(name, value, f"{what}, expected shape {value.box.sizes}, {entry.dtype}")
        held = x.untyped_storage().nbytes()
        if not x.nbytes <= held <= value.nbytes:  # one number in every place, or much that nobody sees
            raise self._damaged(name, value, f"a tensor of {x.nbytes:,} bytes in memory of {held:,}")
        return x

    def whole(self, name: str) -> Tensor:
        """All of the tensor ``name``, put together on the CPU."""
        entry = self.entries[name]
        missing = prod(entry.shape) - sum(value.box.numel for value in entry.values)
        reject(
            f"{self.folder}: {name!r}",
            [f"{missing} elements are in no file"] * (missing > 0),
            ALTERED if self.checks else _UNKNOWN,
            RuntimeError,
        )
        x = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for value in entry.values:
            x[value.box.index] = self.tensor(name, value)
        return x

    def plain(self, name: str) -> Any:
        """The plain value ``name``."""
        return self._value(name, self.entries[name].values[0])

    def verify(self) -> list[str]:
        """What is wrong with the values themselves: every byte is read. Without checksums, each value is loaded."""
        problems = []
        for name, entry in self.entries.items():
            for value in entry.values:
                try:
                    self._examine(name, entry, value)
                except (RuntimeError, OSError) as error:
                    if not isinstance(error.__cause__, NotPlainError):  # which its program wanted so
                        problems.append(str(error))
        return problems

    def _examine(self, name: str, entry: Entry, value: Value) -> None:
        if (value.file, value.start) in self.checks:
            self._bytes(name, value)
        elif entry.dtype is None:
            self._value(name, value)
        else:
            self.tensor(name, value)

    def _value(self, name: str, value: Value) -> Any:
        raw = self._bytes(name, value)
        try:
            return parse(raw)
        except NotPlainError as error:
            what = f"no plain value and no tensor, and nothing else is loaded: {error}"
            raise self._damaged(name, value, what, "Load the others without it.") from error
        except Exception as error:  # arbitrary bytes raise arbitrary errors
            what = f"no plain value and no tensor ({type(error).__name__}: {_beginning(error)})"
            raise self._damaged(name, value, what) from error

    def _bytes(self, name: str, value: Value) -> bytearray:
        """The bytes of a value, which match their checksum."""
        raw = read_bytes(self.folder / value.file, value)
        expected = self.checks.get((value.file, value.start))
        if expected is not None and (found := zlib.crc32(raw)) != expected:
            raise self._damaged(name, value, f"the checksum is {found:08x}, expected {expected:08x}")
        return raw

    def _damaged(self, name: str, value: Value, what: str, unproven: str = _UNKNOWN) -> RuntimeError:
        where = f"{value.nbytes:,} bytes at {value.start:,}"
        return RuntimeError(
            f"{self.folder / value.file}: {name!r}: {where}: {what}. {ALTERED if self.checks else unproven}"
        )


def _what_is_there(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such directory"
    inside = sorted(x.name for x in folder.iterdir() if (x / METADATA).is_file() and not x.name.startswith("."))
    found = (
        f"; but in it are {', '.join(inside[:5])}: pass one of them, as latest({str(folder)!r}) finds" if inside else ""
    )
    return f"there is no {METADATA}{found}"


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
    body = json.dumps({"format": FORMAT, "order": order, "metadata": digest, "files": lengths, "checks": checks})
    write_durably(folder / MANIFEST, f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}".encode())
    for file in files:
        file.unlink()


def has_index(folder: Path, rank: int) -> bool:
    """Whether a rank has written all of its own."""
    return _index_file(folder, f"__{rank}_0.distcp").exists()


def order_of(folder: Path) -> int | None:
    """Which of a directory's checkpoints this is, by its manifest; None where there is none that can be read."""
    try:
        return read_manifest(folder, lengths_of(folder))["order"]
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


def _place_problems(entries: Mapping[str, Entry], lengths: Mapping[str, int]) -> list[str]:
    problems = {
        f"{shown(value.file)}: {problem} ({name!r})"
        for name, entry in entries.items()
        for value in entry.values
        if (problem := _file_problem(value, lengths))
    }
    tensors = ((name, entry) for name, entry in entries.items() if entry.dtype is not None)
    return sorted(problems.union(*(_box_problems(name, entry) for name, entry in tensors)))


def _box_problems(name: str, entry: Entry) -> list[str]:
    boxes = [value.box for value in entry.values]
    problems = [f"{name!r}: {problem}" for value in entry.values if (problem := _box_problem(value, entry))]
    if not problems and (twice := first_overlap(boxes)):  # so that all elements are there if their number is
        problems.append(f"{name!r}: {twice[0]} and {twice[1]} have elements in common")
    return problems


def _box_problem(value: Value, entry: Entry) -> str:
    box, shape = value.box, entry.shape
    if not len(box.offsets) == len(box.sizes) == len(shape):
        return f"{box} is no box of shape {shape}"
    ends = [offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)]
    outside = any(end > size for end, size in zip(ends, shape, strict=True))
    if outside:
        return f"{box} is outside of shape {shape}"
    needed = box.numel * entry.dtype.itemsize if entry.dtype else 0  # nobody makes room for what is not there
    return f"{box} takes {needed:,} bytes, and its value has {value.nbytes:,}" if needed > value.nbytes else ""


def _file_problem(value: Value, lengths: Mapping[str, int]) -> str:
    if value.file not in lengths:
        return "missing, or not in this folder"
    if lengths[value.file] < 0:
        return "no regular file"
    if value.start < 0 or value.nbytes < 0 or value.start + value.nbytes > lengths[value.file]:
        return f"{lengths[value.file]:,} bytes, expected {value.nbytes:,} at {value.start:,}"
    return ""


def _beginning(error: Exception) -> str:
    return shown(" ".join(str(error).split())[:100])
