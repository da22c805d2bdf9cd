"""Verifies metadata against the files of a checkpoint, before any value is read."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import shown
from ..regions import first_overlap
from .metadata import Entry, Value

LARGEST_PLAIN = 1 << 28  # bytes of a plain value, and of what a tensor's value has beside its elements


def length_problems(found: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    """Files that are missing or have another length than the manifest says; ``-1`` is not a regular file."""
    problems = []
    for name, nbytes in expected.items():
        if name not in found:
            problems.append(f"{name}: missing, expected {nbytes:,} bytes")
        elif found[name] < 0:
            problems.append(f"{name}: not a regular file")
        elif found[name] != nbytes:
            problems.append(f"{name}: {found[name]:,} bytes, expected {nbytes:,}")
    return problems


def place_problems(entries: Mapping[str, Entry], lengths: Mapping[str, int]) -> list[str]:
    """Values outside of their file, and regions outside of their tensor or with elements in common."""
    problems = {
        f"{shown(value.file)}: {problem} ({name!r})"
        for name, entry in entries.items()
        for value in entry.values
        if (problem := _file_problem(value, lengths) or _size_problem(value, entry))
    }
    tensors = ((name, entry) for name, entry in entries.items() if entry.dtype is not None)
    return sorted(problems.union(*(_tensor_problems(name, entry) for name, entry in tensors)))


def _file_problem(value: Value, lengths: Mapping[str, int]) -> str:
    if value.file not in lengths:
        return "missing, or not in this folder"
    if lengths[value.file] < 0:
        return "not a regular file"
    if value.start < 0 or value.nbytes < 0 or value.start + value.nbytes > lengths[value.file]:
        return f"{lengths[value.file]:,} bytes, expected {value.nbytes:,} at {value.start:,}"
    return ""


def _size_problem(value: Value, entry: Entry) -> str:
    """Whether reading would allocate far more than the tensor: a sparse file takes no space for what it claims."""
    needed = value.region.numel * entry.dtype.itemsize if entry.dtype else 0
    kind = f"a tensor of {needed:,} bytes" if entry.dtype else "a plain value"
    return f"{value.nbytes:,} bytes for {kind}" if value.nbytes > needed + LARGEST_PLAIN else ""


def _tensor_problems(name: str, entry: Entry) -> list[str]:
    problems = [f"{name!r}: {problem}" for value in entry.values if (problem := _region_problem(value, entry))]
    if not problems and (twice := first_overlap([value.region for value in entry.values])):
        # Without overlaps, the number of elements tells whether all are present.
        problems.append(f"{name!r}: {twice[0]} and {twice[1]} have elements in common")
    return problems


def _region_problem(value: Value, entry: Entry) -> str:
    region, shape = value.region, entry.shape
    if not len(region.offsets) == len(region.sizes) == len(shape):
        return f"{region} is not a region of shape {shape}"
    if any(at + size > end for at, size, end in zip(region.offsets, region.sizes, shape, strict=True)):
        return f"{region} is outside of shape {shape}"
    needed = region.numel * entry.dtype.itemsize if entry.dtype else 0  # allocate no more than the file contains
    return f"{region} takes {needed:,} bytes, and its value has {value.nbytes:,}" if needed > value.nbytes else ""
