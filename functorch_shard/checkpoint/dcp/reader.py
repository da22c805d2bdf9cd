"""Reads a checkpoint in the format of ``torch.distributed.checkpoint``, without executing anything in it.

Note [Files]: ``__<rank>_0.distcp`` contains the values that one rank wrote, each as ``torch.save`` writes it, one after
the other. ``.metadata``, a pickle, maps each region of each tensor to its value. Both are torch's own. In addition,
``functorch_shard.json`` contains the length of each file and a checksum of each value; its first line is a digest of
the rest. A checkpoint of another program does not have one, and only its structure is verified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import reject, shown
from .manifest import ALTERED, MANIFEST, METADATA, lengths_of, read_manifest, read_plain
from .metadata import Entry, Value, entries_of
from .unpickler import NotPlainError
from .validation import length_problems, place_problems
from .values import checksum, parse

# Without a manifest the original contents are unknown.
_UNKNOWN = "The checkpoint is damaged, or was not written as torch.distributed.checkpoint writes it. Load another one."


@dataclass(frozen=True)
class Reader:
    """A checkpoint whose files are present and have the lengths that its metadata needs.

    ``checks``: checksums by file and start.
    """

    folder: Path
    entries: Mapping[str, Entry]
    checks: Mapping[tuple[str, int], int]
    digest: str

    @staticmethod
    def open(folder: Path) -> Reader:
        """Read manifest and metadata, and verify them against the files; read no values.

        Raises:
            FileNotFoundError: ``folder`` is not a checkpoint.
            RuntimeError: files are missing, damaged or links; all of them at once.
        """
        if not (folder / METADATA).is_file() and not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"{folder}: not a checkpoint: {_contents(folder)}")
        lengths = lengths_of(folder)
        manifest = read_manifest(folder, lengths)
        raw = read_plain(folder, METADATA, lengths)
        digest = hashlib.sha256(raw).hexdigest()
        if manifest:
            damaged = [f"{METADATA}: its checksum differs"] if digest != manifest["metadata"] else []
            damaged += length_problems(lengths, manifest["files"])
            reject(f"{folder}: damaged", damaged, ALTERED, RuntimeError)
        try:
            entries = entries_of(raw)
        except RuntimeError as error:
            raise RuntimeError(f"{folder / METADATA}: {error}") from error
        advice = ALTERED if manifest else _UNKNOWN
        reject(f"{folder}: damaged", place_problems(entries, lengths), advice, RuntimeError)
        return Reader(folder, entries, manifest.get("checks", {}), manifest.get("digest", digest))

    def tensor(self, name: str, value: Value) -> Tensor:
        """Read one region of the tensor ``name``, to the CPU; read no other bytes."""
        entry, x = self.entries[name], self._value(name, value)
        if not isinstance(x, Tensor) or (x.shape, x.dtype) != (value.region.sizes, entry.dtype):
            what = f"shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise self._damaged(name, value, f"{what}, expected shape {value.region.sizes}, {entry.dtype}")
        held = x.untyped_storage().nbytes()
        if not x.nbytes <= held <= value.nbytes:  # expanded, or a view of more memory than the value has
            raise self._damaged(name, value, f"a tensor of {x.nbytes:,} bytes in memory of {held:,}")
        return x

    def whole(self, name: str) -> Tensor:
        """Read all regions of the tensor ``name`` into one tensor on the CPU."""
        entry = self.entries[name]
        missing = prod(entry.shape) - sum(value.region.numel for value in entry.values)
        problems = [f"{missing} elements are in no file"] * (missing > 0)
        reject(f"{self.folder}: {name!r}", problems, ALTERED if self.checks else _UNKNOWN, RuntimeError)
        x = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for value in entry.values:
            x[value.region.index] = self.tensor(name, value)
        return x

    def plain(self, name: str) -> Any:
        """Read the plain value ``name``."""
        return self._value(name, self.entries[name].values[0])

    def verify(self) -> list[str]:
        """Read every byte, and list what is wrong. Values without a checksum are loaded instead."""
        problems = []
        for name, entry in self.entries.items():
            for value in entry.values:
                try:
                    self._verify_value(name, entry, value)
                except (RuntimeError, OSError) as error:
                    if not isinstance(error.__cause__, NotPlainError):  # intended by the program that wrote it
                        problems.append(str(error))
        return problems

    def _verify_value(self, name: str, entry: Entry, value: Value) -> None:
        if (value.file, value.start) in self.checks:
            self._check(name, value)
        elif entry.dtype is None:
            self._value(name, value)
        else:
            self.tensor(name, value)

    def _value(self, name: str, value: Value) -> Any:
        self._check(name, value)
        try:
            return parse(self.folder / value.file, value)
        except NotPlainError as error:
            what = f"not a tensor and not a plain value, and nothing else is loaded: {error}"
            raise self._damaged(name, value, what, "Load the others without it.") from error
        except Exception as error:  # arbitrary bytes raise arbitrary errors
            reason = shown(" ".join(str(error).split())[:100])
            what = f"not a tensor and not a plain value ({type(error).__name__}: {reason})"
            raise self._damaged(name, value, what) from error

    def _check(self, name: str, value: Value) -> None:
        """Raise unless the bytes of a value match their checksum, if there is one."""
        expected = self.checks.get((value.file, value.start))
        if expected is not None and (found := checksum(self.folder / value.file, value)) != expected:
            raise self._damaged(name, value, f"the checksum is {found:08x}, expected {expected:08x}")

    def _damaged(self, name: str, value: Value, what: str, unproven: str = _UNKNOWN) -> RuntimeError:
        where = f"{value.nbytes:,} bytes at {value.start:,}"
        advice = ALTERED if self.checks else unproven
        return RuntimeError(f"{self.folder / value.file}: {name!r}: {where}: {what}. {advice}")


def _contents(folder: Path) -> str:
    """What the directory has instead of a checkpoint."""
    if not folder.is_dir():
        return "there is no such directory"
    inside = sorted(x.name for x in folder.iterdir() if (x / METADATA).is_file() and not x.name.startswith("."))
    latest = f"pass one of them, for example latest({str(folder)!r})"
    return f"there is no {METADATA}" + (f"; it contains {', '.join(inside[:5])}: {latest}" if inside else "")
