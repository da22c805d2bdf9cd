"""``functorch_shard.json``: lengths, checksums and order of a checkpoint, believed as far as it is well-formed."""

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

MANIFEST, FORMAT = "functorch_shard.json", 1
ALTERED = "The files were altered since they were written. Load another checkpoint: latest(path, verify=True) finds it."


def lengths_of(folder: Path) -> dict[str, int]:
    """The bytes of each regular file; -1: it is something else, as a link out of the folder."""
    found = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder)}
    return {name: stat.st_size if S_ISREG(stat.st_mode) else -1 for name, stat in found.items()}


def read_plain(folder: Path, name: str, lengths: Mapping[str, int]) -> bytes:
    """All of a regular file."""
    what = "missing" if name not in lengths else "no regular file" if lengths[name] < 0 else ""
    reject(f"{folder}: damaged", [f"{name}: {what}"] if what else [], ALTERED, RuntimeError)
    with open_regular(folder / name) as file:
        return file.read()


def read_manifest(folder: Path, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Of a checkpoint that was saved here; empty for one that another program wrote."""
    if MANIFEST not in lengths:
        return {}
    digest, _, body = read_plain(folder, MANIFEST, lengths).partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise RuntimeError(f"{folder}: damaged: {MANIFEST}: its digest differs. {ALTERED}")
    try:
        manifest = json.loads(body)
    except (ValueError, RecursionError):
        manifest = None
    form = manifest.get("format") if isinstance(manifest, dict) else None
    if type(form) is int and form != FORMAT:
        raise RuntimeError(f"{folder}: {MANIFEST}: format {form}, this version reads format {FORMAT}")
    if not isinstance(manifest, dict) or form is None or not _is_manifest(manifest):
        raise RuntimeError(f"{folder}: damaged: {MANIFEST}: it is none, though its digest fits. {ALTERED}")
    return {**manifest, "digest": digest.decode()}  # of all values, by their checksums


def _is_manifest(x: dict[str, Any]) -> bool:
    files, checks = x.get("files"), x.get("checks")
    return (
        all(map(_is_count, (x["format"], x.get("order"))))
        and isinstance(x.get("metadata"), str)
        and isinstance(files, dict)
        and all(map(_is_count, files.values()))
        and isinstance(checks, dict)
        and all(isinstance(rows, list) and all(map(_is_check, rows)) for rows in checks.values())
    )


def _is_check(row: Any) -> bool:
    """Where a value starts, its bytes, and their checksum."""
    return isinstance(row, list) and len(row) == 3 and all(map(_is_count, row))


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**63
