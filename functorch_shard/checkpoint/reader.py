"""Reads a checkpoint in the format of ``torch.distributed.checkpoint``; nothing in it is executed or trusted."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch
from torch import Tensor

from ..errors import reject, shown
from .format import FORMAT, LARGEST_PLAIN, MANIFEST, METADATA, Entry, Region, Value, entries_of, loaded

_DAMAGED = (
    "The files were altered, or contain what torch.load(weights_only=True) does not read. Load another checkpoint: "
    "latest(path, verify=True) finds it."
)


@dataclass(frozen=True)
class Reader:
    """A checkpoint whose files are present and have the lengths that its metadata needs.

    ``checks``: checksums by file and start. ``identity``: equal on ranks that read the same. ``casts``: whether tensors
    may be loaded into another floating-point dtype.
    """

    folder: Path
    entries: Mapping[str, Entry]
    checks: Mapping[tuple[str, int], int]
    identity: str
    casts: bool = False

    @staticmethod
    def open(folder: Path) -> Reader:
        """Read manifest and metadata, and verify them against the files; read no values."""
        if not (folder / METADATA).is_file() and not (folder / MANIFEST).is_file():
            text = f"there is no {METADATA} in it. latest(path) finds the newest checkpoint of a directory."
            raise FileNotFoundError(f"{folder}: not a checkpoint: {text}")
        lengths = _lengths(folder)
        manifest = _manifest(folder, lengths)
        raw = _read_file(folder, METADATA, lengths)
        digest = hashlib.sha256(raw).hexdigest()
        if manifest and digest != manifest["metadata"]:
            raise RuntimeError(f"{folder}: damaged: the checksum of {METADATA} differs. {_DAMAGED}")
        entries = entries_of(raw, folder / METADATA)
        problems = {
            f"{name!r}: {problem}"
            for name, entry in entries.items()
            for value in entry.values
            if (problem := _problem(entry, value, lengths))
        }
        reject(f"{folder}: damaged", sorted(problems), _DAMAGED, RuntimeError)
        return Reader(folder, entries, manifest.get("checks", {}), f"{folder} {manifest.get('digest', digest)}")

    def tensor(self, name: str, value: Value) -> Tensor:
        """Read one region of the tensor ``name``, to the CPU; read no other bytes."""
        entry, x = self.entries[name], self._value(name, value)
        if not isinstance(x, Tensor) or (x.shape, x.dtype) != (value.region.sizes, entry.dtype):
            what = f"shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise self._damaged(name, value, f"{what}, expected shape {value.region.sizes}, {entry.dtype}")
        return x

    def read(self, wanted: Iterable[tuple[str, Region, Tensor]]) -> None:
        """Copy regions of tensors to memory, file by file; read each value once."""
        copies: dict[tuple[str, Value], list[tuple[Tensor, tuple[slice, ...]]]] = {}
        for name, region, target in wanted:
            parts = {value: both for value in self.entries[name].values if (both := region.overlap(value.region))}
            for value, both in parts.items():
                part = target[both.inside(region).index], both.inside(value.region).index
                copies.setdefault((name, value), []).append(part)
            if missing := _missing(region, [*parts.values()]):
                text = f"{self.folder}: {name!r}: {missing} elements of {region} are in no file."
                raise RuntimeError(f"{text} {_DAMAGED}")
        for (name, value), pairs in sorted(copies.items(), key=lambda x: (x[0][1].file, x[0][1].start)):
            x = self.tensor(name, value)
            for target, source in pairs:
                target.copy_(x[source])

    def whole(self, name: str) -> Tensor:
        """Read all regions of the tensor ``name`` into one tensor on the CPU."""
        entry = self.entries[name]
        x = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.read([(name, Region.whole(entry.shape), x)])
        return x

    def plain(self, name: str) -> Any:
        """Read the plain value ``name``."""
        return self._value(name, self.entries[name].values[0])

    def verify(self) -> list[str]:
        """Read every value, and list what is wrong."""
        problems = []
        for name, entry in self.entries.items():
            for value in entry.values:
                try:
                    self._value(name, value) if entry.dtype is None else self.tensor(name, value)
                except (RuntimeError, OSError) as error:
                    problems.append(str(error))
        return problems

    def _value(self, name: str, value: Value) -> Any:
        """Read one value, and compare its checksum, if there is one."""
        with (self.folder / value.file).open("rb") as file:
            file.seek(value.start)
            raw = file.read(value.nbytes)
        expected = self.checks.get((value.file, value.start))
        if expected is not None and (found := zlib.crc32(raw)) != expected:
            raise self._damaged(name, value, f"the checksum is {found:08x}, expected {expected:08x}")
        try:
            return loaded(raw)
        except Exception as error:  # arbitrary bytes raise arbitrary errors
            what = f"not a tensor and not a plain value ({type(error).__name__})"
            raise self._damaged(name, value, what) from error

    def _damaged(self, name: str, value: Value, what: str) -> RuntimeError:
        where = f"{value.nbytes:,} bytes at {value.start:,}"
        return RuntimeError(f"{self.folder / value.file}: {name!r}: {where}: {what}. {_DAMAGED}")


def _missing(region: Region, parts: Sequence[Region]) -> int:
    """How many elements of a region are in none of its parts, which may overlap."""
    if region in parts:
        return 0
    absent = torch.ones(region.sizes, dtype=torch.bool, device="cpu")
    for part in parts:
        absent[part.inside(region).index] = False
    return int(absent.sum())


def order_of(folder: Path) -> int | None:
    """The position among the checkpoints of a directory; None without a manifest that can be read."""
    try:
        return _manifest(folder, _lengths(folder)).get("order")
    except (OSError, RuntimeError):
        return None


def _lengths(folder: Path) -> dict[str, int]:
    """The length of each regular file; a link is none."""
    found = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder)}
    return {name: stat.st_size for name, stat in found.items() if S_ISREG(stat.st_mode)}


def _found(name: str, lengths: Mapping[str, int]) -> str:
    return f"{lengths[name]:,} bytes" if name in lengths else "missing, or not a regular file in this folder"


def _read_file(folder: Path, name: str, lengths: Mapping[str, int]) -> bytes:
    reject(f"{folder}: damaged", [f"{name}: {_found(name, lengths)}"] * (name not in lengths), _DAMAGED, RuntimeError)
    return (folder / name).read_bytes()


def _manifest(folder: Path, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Read the manifest; empty for a checkpoint of another program."""
    if not os.path.lexists(folder / MANIFEST):
        return {}
    digest, _, body = _read_file(folder, MANIFEST, lengths).partition(b"\n")
    try:
        manifest = json.loads(body)
        checks = {(file, start): crc for file, rows in manifest["checks"].items() for start, crc in rows}
        manifest = {"order": int(manifest["order"]), "metadata": manifest["metadata"], "format": manifest["format"]}
    except Exception as error:  # an arbitrary text raises arbitrary errors
        raise RuntimeError(f"{folder}: {MANIFEST} is damaged ({type(error).__name__}). {_DAMAGED}") from error
    if hashlib.sha256(body).hexdigest().encode() != digest or manifest["format"] != FORMAT:
        raise RuntimeError(f"{folder}: {MANIFEST}: its digest differs, or it is not of format {FORMAT}. {_DAMAGED}")
    return {**manifest, "checks": checks, "digest": digest.decode()}  # covers all values, by their checksums


def _problem(entry: Entry, value: Value, lengths: Mapping[str, int]) -> str:
    """Why a value is not in its file, or its region not in its tensor; empty if they are."""
    region, shape, file = value.region, entry.shape, shown(value.file)
    needed = region.numel * entry.dtype.itemsize if entry.dtype else 0
    if value.start + value.nbytes > lengths.get(value.file, -1):
        return f"{file}: {_found(value.file, lengths)}, expected {value.nbytes:,} at {value.start:,}"
    if value.nbytes > needed + LARGEST_PLAIN:  # a sparse file takes no space for what it claims
        return f"{file}: {value.nbytes:,} bytes for a value of {needed:,}"
    if not len(region.offsets) == len(region.sizes) == len(shape):
        return f"{region} is not a region of shape {shape}"
    if any(at + size > end for at, size, end in zip(region.offsets, region.sizes, shape, strict=True)):
        return f"{region} is outside of shape {shape}"
    if needed > value.nbytes:  # allocate no more than the file contains
        return f"{region} takes {needed:,} bytes, and its value has {value.nbytes:,}"
    return ""
