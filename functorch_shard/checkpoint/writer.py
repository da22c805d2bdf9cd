"""Writes the files of a checkpoint: each rank its own values, and rank 0 the index of all of them."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch

from .chunks import Chunk
from .format import FORMAT, MANIFEST, METADATA, metadata_of
from .names import Path as TreePath
from .reader import LARGEST_PLAIN
from .regions import SCALAR
from .staging import try_to_lock, write_durably


class Writer:
    """Writes the file of one rank: values one after the other, each with its checksum."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.name, self._folder = f"__{rank}_0.distcp", folder
        self.rows: list[dict[str, Any]] = []
        self._file = _ChecksumFile((folder / self.name).open("xb"))
        try_to_lock(self._file.file.fileno())  # until it is closed, or the process ends

    def tensor(self, chunk: Chunk) -> None:
        """Append the elements of one region."""
        # A copy: torch.save writes the whole storage of a view.
        plain = chunk.values.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        plain = plain.resolve_conj().resolve_neg()
        described = {"shape": chunk.shape, "dtype": str(plain.dtype).removeprefix("torch."), "region": chunk.region}
        self._save(plain, {"paths": chunk.paths, **described})

    def plain(self, path: TreePath, value: Any) -> None:
        """Append a plain value."""
        self._save(value, {"paths": [path], "shape": [], "dtype": None, "region": SCALAR})
        if (nbytes := self.rows[-1]["nbytes"]) > LARGEST_PLAIN:
            raise ValueError(
                f"save: {path}: {nbytes:,} bytes of a plain value, which load refuses. Save it as a tensor."
            )

    def close(self) -> None:
        """Sync the file to the disk, and write its index for :func:`complete`."""
        self._file.flush()
        os.fsync(self._file.file.fileno())
        index = {"file": self.name, "nbytes": self._file.total, "rows": self.rows}
        write_durably(_index_file(self._folder, self.name), json.dumps(index).encode())
        self._file.file.close()

    def abandon(self) -> None:
        self._file.file.close()

    def _save(self, value: Any, row: dict[str, Any]) -> None:
        start = self._file.total
        self._file.crc = 0
        try:
            torch.save(value, self._file)  # pyright: ignore[reportArgumentType]
        except RuntimeError:
            if self._file.error:  # for example a full disk, which torch reports without the reason
                raise self._file.error from None
            raise
        nbytes = self._file.total - start
        self.rows.append({**row, "start": start, "nbytes": nbytes, "crc": self._file.crc})


def complete(folder: Path, ranks: Iterable[int], order: int) -> None:
    """Write metadata and manifest for the files of all ranks, and remove their indices."""
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
    """Whether a rank has written all of its values."""
    return _index_file(folder, f"__{rank}_0.distcp").exists()


def is_abandoned(folder: Path, rank: int) -> bool:
    """Whether the process that wrote the values of a rank has ended before all were written."""
    with (folder / f"__{rank}_0.distcp").open("r+b") as file:
        return try_to_lock(file.fileno()) and not has_index(folder, rank)


def _index_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.index"


class _ChecksumFile:
    """A file that counts the bytes written, and their checksum since ``crc`` was set to 0."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.flush = file, file.flush
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
