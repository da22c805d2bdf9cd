"""What ``.metadata`` says, in the classes of ``torch.distributed.checkpoint``: a pickle, read without executing it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp

from ...errors import shown

# Private, and part of torch's format: every .metadata names this class.
from ...torch_internals.dcp import MemoryFormat, StorageInfo
from ..chunks import SCALAR
from ..names import Path, dotted
from ..regions import Box
from .unpickler import DTYPES, InertObject, is_class, read


class Value(NamedTuple):
    """One value in a file: a box of a tensor, or something else that is plain (``SCALAR``)."""

    box: Box
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Entry:
    """All that a checkpoint has under one name; ``dtype`` None: a plain value and no tensor."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    values: tuple[Value, ...]

    @property
    def nbytes(self) -> int:
        """Of the numbers of a tensor."""
        return prod(self.shape) * self.dtype.itemsize if self.dtype else 0

    def __str__(self) -> str:
        return "a plain value" if self.dtype is None else f"shape {self.shape}, {self.dtype}"


def metadata_of(indices: Sequence[Mapping[str, Any]]) -> bytes:
    """The pickle that says what the files of all ranks hold, by the index of each."""
    tensors: dict[str, dcp.STORAGE_TYPES] = {}
    places: dict[dcp.MetadataIndex, StorageInfo] = {}
    paths: dict[str, Path] = {}
    for index in indices:
        for row in index["rows"]:
            info = StorageInfo(index["file"], row["start"], row["nbytes"])
            for path in map(tuple, row["paths"]):
                paths[dotted(path)] = path
                places[_add(tensors, dotted(path), row)] = info
    return pickle.dumps(dcp.Metadata(tensors, paths, places, dcp.StorageMeta()))


def _add(tensors: dict[str, dcp.STORAGE_TYPES], name: str, row: Mapping[str, Any]) -> dcp.MetadataIndex:
    if row["dtype"] is None:
        tensors[name] = dcp.BytesStorageMetadata()
        return dcp.MetadataIndex(name)
    offsets, sizes = map(torch.Size, row["box"])
    properties = dcp.TensorProperties(dtype=getattr(torch, row["dtype"]))
    entry = tensors.setdefault(name, dcp.TensorStorageMetadata(properties, torch.Size(row["shape"]), []))
    assert isinstance(entry, dcp.TensorStorageMetadata)
    entry.chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
    return dcp.MetadataIndex(name, offsets, len(entry.chunks) - 1)


_CLASSES = (
    dcp.Metadata,
    dcp.TensorStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.TensorProperties,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    MemoryFormat,
    StorageInfo,
)
_ADMITTED = {f"{cls.__module__}.{cls.__name__}" for cls in _CLASSES} | {
    *DTYPES,
    *(f"pathlib{more}.{name}" for more in ("", "._local") for name in ("PosixPath", "WindowsPath")),  # not used
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
}
_Places = Mapping[tuple[str, "tuple[int, ...] | None"], Any]  # by name, and where in the tensor


def entries_of(raw: bytes) -> dict[str, Entry]:
    """What a pickle says, looked at part by part: it may have put anything anywhere.

    Raises:
        RuntimeError: it is no metadata, or names what metadata has no need of; nothing in it was executed.
    """
    try:
        top = _fields(read(raw, _ADMITTED, _refuse_persistent), dcp.Metadata)
        paths = top.get("planner_data") or {}
        places = {_key(index): info for index, info in top["storage_data"].items()}
        described = top["state_dict_metadata"].items()
        return {_text(name): _entry(name, _path(paths.get(name, (name,))), x, places) for name, x in described}
    except Exception as error:  # whatever bytes that are no metadata lead to
        what = shown(f"{type(error).__name__}: {error}")
        raise RuntimeError(f"no metadata of a checkpoint, and nothing in it was executed ({what})") from error


def _refuse_persistent(pid: Any) -> None:
    raise ValueError("it refers to something outside of itself")


def _fields(x: Any, cls: type) -> dict[str, Any]:
    """What an object of ``cls`` was to have as attributes."""
    if not _is(x, cls) or not isinstance(x.state, dict):
        raise TypeError(f"a {getattr(type(x), 'name', type(x).__name__)} and no {cls.__name__}")
    return x.state


def _is(x: Any, cls: type) -> bool:
    return isinstance(x, InertObject) and type(x).name == f"{cls.__module__}.{cls.__name__}"


def _key(index: Any) -> tuple[str, tuple[int, ...] | None]:
    fields = _fields(index, dcp.MetadataIndex)
    offset = fields.get("offset")
    return _text(fields["fqn"]), None if offset is None else _integers(offset)


def _path(x: Any) -> Path:
    path = tuple(x)
    if not all(isinstance(part, (str, int)) for part in path):
        raise TypeError("a path that is not of texts and numbers")
    return path


def _text(x: Any) -> str:
    if type(x) is not str:
        raise TypeError(f"a {type(x).__name__}, expected a text")
    return x


def _integers(x: Any) -> tuple[int, ...]:
    found = tuple(x.args[0] if _is(x, torch.Size) else x)
    if not all(type(n) is int and n >= 0 for n in found):
        raise ValueError("sizes or offsets that are no numbers of elements")
    return found


def _dtype(properties: Any) -> torch.dtype:
    if not _is(properties, dcp.TensorProperties):
        raise TypeError("no properties of a tensor")
    named = properties.state[0]
    if not is_class(named) or named.name not in DTYPES:
        raise TypeError("a tensor whose dtype is none")
    return DTYPES[named.name]


def _entry(name: str, path: Path, described: Any, places: _Places) -> Entry:
    if _is(described, dcp.BytesStorageMetadata):
        return Entry(path, (), None, (_value(SCALAR, places[name, None]),))
    fields = _fields(described, dcp.TensorStorageMetadata)
    chunks = [_fields(chunk, dcp.ChunkStorageMetadata) for chunk in fields["chunks"]]
    boxes = [Box(_integers(chunk["offsets"]), _integers(chunk["sizes"])) for chunk in chunks]
    values = dict.fromkeys(_value(box, places[name, box.offsets]) for box in boxes)  # one that is told twice is one
    return Entry(path, _integers(fields["size"]), _dtype(fields["properties"]), tuple(values))


def _value(box: Box, info: Any) -> Value:
    fields = _fields(info, StorageInfo)
    if transforms := fields.get("transform_descriptors"):
        raise ValueError(f"values are stored through {transforms}, which is not supported")
    start, nbytes = _integers((fields["offset"], fields["length"]))
    return Value(box, _text(fields["relative_path"]), start, nbytes)
