"""Reads ``functorch_shard.json``: lengths, checksums and order of a checkpoint. Its form is verified, not trusted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any

from ...errors import reject
from .values import open_regular

METADATA, MANIFEST, FORMAT = ".metadata", "functorch_shard.json", 1
LARGEST = 1 << 30  # bytes of these two files
ALTERED = "The files were altered since they were written. Load another checkpoint: latest(path, verify=True) finds it."


def lengths_of(folder: Path) -> dict[str, int]:
    """The length of each regular file; -1 for anything else, for example a symbolic link."""
    found = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder)}
    return {name: stat.st_size if S_ISREG(stat.st_mode) else -1 for name, stat in found.items()}


def read_plain(folder: Path, name: str, lengths: Mapping[str, int]) -> bytes:
    """Read a regular file."""
    what = "missing" if name not in lengths else "not a regular file" if lengths[name] < 0 else ""
    if lengths.get(name, 0) > LARGEST:  # a sparse file takes no space for what it claims
        what = f"{lengths[name]:,} bytes, expected at most {LARGEST:,}"
    reject(f"{folder}: damaged", [f"{name}: {what}"] if what else [], ALTERED, RuntimeError)
    with open_regular(folder / name) as file:
        return file.read()


def read_manifest(folder: Path, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Read the manifest; empty for a checkpoint of another program."""
    if MANIFEST not in lengths:
        return {}
    digest, _, body = read_plain(folder, MANIFEST, lengths).partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise RuntimeError(f"{folder}: {MANIFEST} is damaged: its digest differs. {ALTERED}")
    try:
        manifest = json.loads(body)
        if type(version := manifest["format"]) is int and version != FORMAT:
            raise RuntimeError(f"{folder}: {MANIFEST}: format {version}, this version reads format {FORMAT}")
        counts = [version, manifest["order"], *manifest["files"].values()]
        checks = {(file, start): crc for file, rows in manifest["checks"].items() for start, _, crc in rows}
        counts += [number for (_, start), crc in checks.items() for number in (start, crc)]
        if not all(type(x) is int and 0 <= x < 2**63 for x in counts) or type(manifest["metadata"]) is not str:
            raise TypeError
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        text = f"{folder}: {MANIFEST} is not a valid manifest, although its digest matches. {ALTERED}"
        raise RuntimeError(text) from error
    return {**manifest, "checks": checks, "digest": digest.decode()}  # covers all values, by their checksums


def order_of(folder: Path) -> int | None:
    """The position among the checkpoints of a directory; None without a manifest that can be read."""
    try:
        return read_manifest(folder, lengths_of(folder))["order"]
    except (OSError, RuntimeError, KeyError):
        return None
