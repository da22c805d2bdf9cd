"""Finds safetensors files (a path, several, a directory, or an index of Hugging Face) and the tensors in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...storage.atomic_directory import local_path
from .format import LONGEST_JSON, Place, parse_json, read_header, reason

INDEX, SINGLE, SUFFIX = "model.safetensors.index.json", "model.safetensors", ".safetensors"
StrPath = str | os.PathLike[str]
Paths = StrPath | Sequence[StrPath]


@dataclass
class _Found:
    """The files found so far; ``promised``: for a tensor in an index, its file and the index."""

    paths: dict[Path, None] = field(default_factory=dict)
    promised: dict[str, tuple[Path, Path]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def locate(files: Paths) -> tuple[dict[str, Place], list[str]]:
    """Find the place of each tensor of ``files``, by name, and list all problems. Reads only headers."""
    found = _Found()
    for path in _given(files):
        _look(path, found)
    read = {path: read_header(path) for path in found.paths}
    headers = {path: places for path, (places, _) in read.items()}
    damaged = {path for path, (_, problems) in read.items() if problems}
    found.problems += [problem for _, problems in read.values() for problem in problems]
    return _by_name(headers, damaged, found), found.problems


def _given(files: Any) -> list[Path]:
    several = isinstance(files, Sequence) and not isinstance(files, (str, bytes))
    given: list[Any] = list(files) if several else [files]
    if not given or not all(isinstance(path, (str, os.PathLike)) for path in given):
        raise TypeError(f"files: got {files!r}, expected a path or several: of files, an index or a directory")
    return [local_path("import_safetensors: files", path) for path in given]


def _look(path: Path, found: _Found) -> None:
    """Add the files of ``path``."""
    if path.is_dir():
        _look_in_directory(path, found)
    elif path.suffix == ".json":
        _look_in_index(path, found)
    else:
        found.paths[path] = None


def _look_in_directory(folder: Path, found: _Found) -> None:
    """Add the files with Hugging Face's names, or else all that end in ``.safetensors``."""
    if os.path.lexists(folder / INDEX):
        return _look_in_index(folder / INDEX, found)
    single = folder / SINGLE
    paths = [single] if os.path.lexists(single) else [folder / name for name in sorted(_names_in(folder, found))]
    found.paths.update(dict.fromkeys(paths))
    if not paths:
        found.problems.append(f"{folder}: contains neither {INDEX!r} nor a file that ends in {SUFFIX!r}")
    return None


def _names_in(folder: Path, found: _Found) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(SUFFIX)]
    except OSError as error:
        found.problems.append(f"{folder}: {reason(error)}")
        return []


def _look_in_index(path: Path, found: _Found) -> None:
    try:
        weights = _weight_map(path)
    except (OSError, ValueError, RecursionError) as error:
        found.problems.append(f"{path}: {reason(error)}")
        return
    files = {name: _sibling_file(path, name) for name in dict.fromkeys(weights.values())}
    for name, file in files.items():
        if file is None:
            found.problems.append(f"{path}: refers to {name!r}, which is outside of its directory")
        else:
            found.paths[file] = None
    found.promised |= {name: (file, path) for name, value in weights.items() if (file := files[value])}


def _weight_map(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError("not a regular file" if path.exists() else "no such file")
    if (size := path.stat().st_size) > LONGEST_JSON:
        raise ValueError(f"an index of {size:,} bytes, the limit is {LONGEST_JSON:,}")
    weights = parse_json(path.read_bytes()).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise ValueError("has no 'weight_map' from names to files")
    return weights


def _sibling_file(index: Path, name: str) -> Path | None:
    """The file that an index refers to, or None outside of its directory; links are followed."""
    folder = index.parent.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":  # the cache of Hugging Face: snapshots link to blobs
        allowed.append(folder.parent.parent / "blobs")
    try:
        target = (folder / name).resolve()
    except (OSError, ValueError, RuntimeError):  # an invalid path, or a cycle of links
        return None
    return index.parent / name if any(target.is_relative_to(parent) for parent in allowed) else None


def _by_name(headers: dict[Path, dict[str, Place]], damaged: set[Path], found: _Found) -> dict[str, Place]:
    """The place of each name: in the file that the index says, or in the only one that has it."""
    places: dict[str, Place] = {}
    for name, (path, index) in found.promised.items():
        if name in headers[path]:
            places[name] = headers[path][name]
        elif path not in damaged:
            found.problems.append(f"{name!r}: {index} says it is in {path}, which has no such tensor")
    for header in headers.values():
        for name, place in header.items():
            if places.setdefault(name, place).file != place.file and name not in found.promised:
                found.problems.append(f"{name!r}: in two files, {places[name].file} and {place.file}")
    return places
