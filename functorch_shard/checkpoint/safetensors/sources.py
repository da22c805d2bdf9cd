"""Which files: one, several, a directory, or an index of Hugging Face; and where each tensor is in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .format import LONGEST_JSON, Place, parse_json, read_header, reason

INDEX, SINGLE, SUFFIX = "model.safetensors.index.json", "model.safetensors", ".safetensors"
StrPath = str | os.PathLike[str]
Paths = StrPath | Sequence[StrPath]


@dataclass
class _Found:
    """What the search has come upon so far; ``promised``: the file that an index names for a tensor, and the index."""

    paths: dict[Path, None] = field(default_factory=dict)
    promised: dict[str, tuple[Path, Path]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def locate(files: Paths) -> tuple[dict[str, Place], list[str]]:
    """Where each tensor of ``files`` is, by name; and everything that is wrong with them. Reads headers alone."""
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
        raise TypeError(f"files: got {files!r}, expected a path, or several: of files, an index or a directory")
    return [Path(path) for path in given]


def _look(path: Path, found: _Found) -> None:
    """Add the files that ``path`` stands for."""
    if path.is_dir():
        _look_in_directory(path, found)
    elif path.suffix == ".json":
        _look_in_index(path, found)
    else:
        found.paths[path] = None


def _look_in_directory(folder: Path, found: _Found) -> None:
    """By the names that Hugging Face gives; where there are none of those, everything that ends like it."""
    if os.path.lexists(folder / INDEX):
        return _look_in_index(folder / INDEX, found)
    single = folder / SINGLE
    paths = [single] if os.path.lexists(single) else [folder / name for name in sorted(_names_in(folder, found))]
    found.paths.update(dict.fromkeys(paths))
    if not paths:
        found.problems.append(f"{folder}: has neither {INDEX!r} nor any file that ends in {SUFFIX!r}")
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
    files = {name: _file_beside(path, name) for name in dict.fromkeys(weights.values())}
    for name, file in files.items():
        if file is None:
            found.problems.append(f"{path}: leads to {name!r}, which is outside of its directory")
        else:
            found.paths[file] = None
    found.promised |= {name: (file, path) for name, value in weights.items() if (file := files[value])}


def _weight_map(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError("no regular file" if path.exists() else "no such file")
    if (size := path.stat().st_size) > LONGEST_JSON:
        raise ValueError(f"an index of {size:,} bytes; more than {LONGEST_JSON:,} is none")
    weights = parse_json(path.read_bytes()).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise ValueError("has no 'weight_map' from names to files")
    return weights


def _file_beside(index: Path, name: str) -> Path | None:
    """The file that an index names, unless it is somewhere else; links are followed."""
    folder = index.parent.resolve()
    homes = [folder]
    if folder.parent.name == "snapshots":  # the cache of Hugging Face: its snapshots are links to blobs beside them
        homes.append(folder.parent.parent / "blobs")
    try:
        target = (folder / name).resolve()
    except (OSError, ValueError, RuntimeError):  # no path at all, or links in a circle
        return None
    return index.parent / name if any(target.is_relative_to(home) for home in homes) else None


def _by_name(headers: dict[Path, dict[str, Place]], damaged: set[Path], found: _Found) -> dict[str, Place]:
    """One place for each name: where the index says, or the only file that has it."""
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
