"""Reads and writes the headers of safetensors files, without trusting them.

A file consists of 8 bytes N (little-endian), N bytes of JSON, and the data of all tensors, row-major and little-endian,
one after the other without gaps: https://huggingface.co/docs/safetensors. A file is untrusted: all offsets and shapes
in a header are compared with the size of the file before anything is allocated or read.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
METADATA = "__metadata__"
LONGEST_JSON = 100_000_000  # bytes of a header or an index; the format's own limit for headers
_MOST_DIMS, _LARGEST = 64, 2**63 - 1
_SHOWN = 10  # problems of one file: a header may have a million
_READ_AT_ONCE = 1 << 24  # bytes


class Place(NamedTuple):
    """The data of a tensor: ``file[start:start + nbytes]``. ``code``: its dtype as spelled in the file."""

    file: Path
    code: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        """None for a code that this library does not know."""
        return DTYPES.get(self.code)

    def __str__(self) -> str:
        return f"shape {self.shape}, {self.dtype or self.code} in {self.file}"


def read_header(path: Path) -> tuple[dict[str, Place], list[str]]:
    """Read the place of each tensor of a file, by name, and list the problems of the file. Reads no data."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            return {}, [f"{path}: {'not a regular file' if path.exists() else 'no such file'}"]
        with FileIO(path) as file:
            size = os.fstat(file.fileno()).st_size
            header, start = _read_json(file, size)
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{path}: {reason(error)}"]
    places, problems = {}, []
    for name, data in header.items():
        try:
            places[name] = _place(path, data, start, size)
        except ValueError as error:
            problems.append(f"{path}: {name!r}: {error}")
    problems = problems or [f"{path}: {text}" for text in _disorder(places, start, size)]
    more = [f"{path}: and {len(problems) - _SHOWN} more problems"] if len(problems) > _SHOWN else []
    return places, problems[:_SHOWN] + more


def header_of(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Make the header of a file of these tensors, in this order."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # aligns the data in a mapped file
    return len(text).to_bytes(8, "little") + text


def read_numbers(place: Place, start: int, numel: int) -> Iterator[Tensor]:
    """Read ``x.flatten()[start:start + numel]`` of the tensor at ``place``, in parts; reads no other bytes."""
    if sys.byteorder != "little":
        raise NotImplementedError("safetensors: files are little-endian, this machine is not")
    assert place.dtype is not None
    at_once = _READ_AT_ONCE // place.dtype.itemsize
    with FileIO(place.file) as file:
        file.seek(place.start + start * place.dtype.itemsize)
        for first in range(0, numel, at_once):
            data = _read_exactly(file, min(at_once, numel - first) * place.dtype.itemsize)
            if place.dtype == torch.bool:  # a bool is 0 or 1, the file may contain other bytes
                yield torch.frombuffer(data, dtype=torch.uint8) != 0
            else:
                yield torch.frombuffer(data, dtype=place.dtype)


def parse_json(data: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object without duplicate names."""
    value = json.loads(data.decode(), object_pairs_hook=_once_each)
    if not isinstance(value, dict):
        raise ValueError(f"JSON of a {type(value).__name__}, expected an object")
    return value


def _read_json(file: FileIO, size: int) -> tuple[dict[str, Any], int]:
    """The header without its metadata, and the start of the data."""
    if size < 8:
        raise ValueError(f"{size} bytes, but a safetensors file starts with 8, the length of its header")
    length = int.from_bytes(_read_exactly(file, 8), "little")
    if length > size - 8:
        raise ValueError(f"truncated, or not a safetensors file: a header of {length:,} bytes in a file of {size:,}")
    if length > LONGEST_JSON:
        raise ValueError(f"a header of {length:,} bytes; the format allows {LONGEST_JSON:,}")
    header = parse_json(_read_exactly(file, length))
    header.pop(METADATA, None)
    return header, 8 + length


def _read_exactly(file: FileIO, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    memory, filled = memoryview(data), 0
    while filled < nbytes:
        got = file.readinto(memory[filled:])
        if not got:
            raise ValueError(f"{file.name}: ended while it was read: another program is writing to it")
        filled += got
    return data


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is twice in its JSON")
    return result


def _place(path: Path, data: Any, numbers: int, size: int) -> Place:
    """Parse one entry of a header, whose offsets count from byte ``numbers``; other keys are ignored."""
    known = isinstance(data, dict) and data.keys() >= {"dtype", "shape", "data_offsets"}
    if not known or not isinstance(data["dtype"], str) or not re.fullmatch(r"\w{1,32}", data["dtype"]):
        raise ValueError("not a valid entry: expected dtype, shape and data_offsets")
    code, shape, offsets = data["dtype"], data["shape"], data["data_offsets"]
    if not _integers(shape) or not _integers(offsets) or len(shape) > _MOST_DIMS or len(offsets) != 2:
        raise ValueError("expected lists of non-negative integers as shape and data_offsets, the latter of two")
    start, end = offsets
    if start > end:
        raise ValueError(f"bytes {start} to {end}: it ends before it starts")
    if numbers + end > size:
        raise ValueError(f"ends at byte {numbers + end:,}, but the file has {size:,}: truncated")
    if code in DTYPES and (needed := prod(shape) * DTYPES[code].itemsize) != end - start:
        raise ValueError(f"{end - start} bytes, but shape {tuple(shape)} of {code} takes {needed}")
    return Place(path, code, tuple(shape), numbers + start, end - start)


def _integers(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n <= _LARGEST for n in values)


def _disorder(places: dict[str, Place], start: int, size: int) -> Iterator[str]:
    """Overlaps and gaps between tensors."""
    taken, before = start, "the header"
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if place.start != taken:
            what = "overlaps" if place.start < taken else "leaves a gap after"
            yield f"{name!r}: {what} {before}: it starts at byte {place.start:,}, expected {taken:,}"
        taken, before = max(taken, place.start + place.nbytes), repr(name)
    if taken < size:
        yield f"{size - taken:,} bytes after {before} that belong to no tensor"


def reason(error: Exception) -> str:
    """The text of an error, without the path."""
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    kind = "not JSON: " if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else ""
    return kind + (error.strerror if isinstance(error, OSError) and error.strerror else str(error))
