"""What ``.metadata`` says, in the classes of ``torch.distributed.checkpoint``: a pickle, read without executing it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp

# Private, and part of torch's format: every .metadata names this class.
from torch.distributed.checkpoint.filesystem import _StorageInfo

from .boxes import Box
from .naming import Path, dotted
from .pieces import SCALAR


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
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Path] = {}
    for index in indices:
        for row in index["rows"]:
            info = _StorageInfo(index["file"], row["start"], row["nbytes"])
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


class _Unpickler(pickle.Unpickler):
    """Makes DCP's own descriptions, and refuses whatever else a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.split(".")[0] == "pathlib":  # the place it was written to, which nobody asks for
            return lambda *parts: "/".join(map(str, parts))
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


_CLASSES = (
    dcp.Metadata,
    dcp.TensorStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.TensorProperties,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    dcp._MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
)
_ADMITTED: dict[tuple[str, str], Any] = {(cls.__module__, cls.__name__): cls for cls in _CLASSES}
_ADMITTED["torch", "Size"] = torch.Size
_ADMITTED["torch.serialization", "_get_layout"] = lambda name: {"torch.strided": torch.strided}[name]
_ADMITTED["collections", "OrderedDict"] = dict


def entries_of(raw: bytes) -> dict[str, Entry]:
    """What a pickle says, looked at part by part: it may have put anything anywhere.

    Raises:
        RuntimeError: it is no metadata, or names what metadata has no need of; nothing in it was executed.
    """
    try:
        read = _Unpickler(io.BytesIO(raw)).load()
        if not isinstance(read, dcp.Metadata):
            raise TypeError(f"it is a {type(read).__name__}")
        paths = read.planner_data or {}
        places: Any = read.storage_data
        return {
            str(name): _entry(str(name), tuple(paths.get(name, (name,))), described, places)
            for name, described in read.state_dict_metadata.items()
        }
    except Exception as error:  # whatever bytes that are no metadata lead to
        what = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"no metadata of a checkpoint, and nothing in it was executed ({what})") from error


def _entry(name: str, path: Path, described: Any, places: Mapping[dcp.MetadataIndex, Any]) -> Entry:
    if isinstance(described, dcp.BytesStorageMetadata):
        return Entry(path, (), None, (_value(SCALAR, places[dcp.MetadataIndex(name)]),))
    shape = tuple(map(int, described.size))
    boxes = [Box(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))) for chunk in described.chunks]
    values = [_value(box, places[dcp.MetadataIndex(name, box.offsets)]) for box in boxes]
    return Entry(path, shape, described.properties.dtype, tuple(values))


def _value(box: Box, info: Any) -> Value:
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"values are stored through {info.transform_descriptors}, which is not supported")
    return Value(box, str(info.relative_path), int(info.offset), int(info.length))
