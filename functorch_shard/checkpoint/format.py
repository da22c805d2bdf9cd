"""The index of a checkpoint, ``.metadata``: a pickle of classes of ``torch.distributed.checkpoint``, both ways.

Note [Files]: ``__<rank>_0.distcp`` contains the values that one rank wrote, each as ``torch.save`` writes it, one after
the other. ``.metadata`` maps each region of each tensor to its value. Both are torch's own. In addition,
``functorch_shard.json``, the manifest, contains the length of each file and a checksum of each value; its first line is
a digest of the rest. A checkpoint of another program does not have one, and only its structure is verified.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp

from ..errors import shown
from ..torch_internals.tensors import storage_info
from .names import Path, dotted
from .pickles import DTYPES, InertObject, is_class, read
from .regions import SCALAR, Region

METADATA, MANIFEST, FORMAT = ".metadata", "functorch_shard.json", 1
StorageInfo = storage_info()


class Value(NamedTuple):
    """One value in a file: a region of a tensor, or a plain value (``SCALAR``)."""

    region: Region
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Entry:
    """All values under one name. A plain value has ``dtype`` None."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    values: tuple[Value, ...]

    @property
    def nbytes(self) -> int:
        """Of the tensor's elements."""
        return prod(self.shape) * self.dtype.itemsize if self.dtype else 0

    def __str__(self) -> str:
        return "a plain value" if self.dtype is None else f"shape {self.shape}, {self.dtype}"


def metadata_of(indices: Sequence[Mapping[str, Any]]) -> bytes:
    """Make the pickle that describes the files of all ranks, from the index of each."""
    tensors: dict[str, dcp.STORAGE_TYPES] = {}
    places: dict[dcp.MetadataIndex, Any] = {}
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
    offsets, sizes = map(torch.Size, row["region"])
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
    StorageInfo,
)
_ADMITTED = {f"{cls.__module__}.{cls.__name__}" for cls in _CLASSES} | {
    *DTYPES,
    *(f"pathlib{more}.{name}" for more in ("", "._local") for name in ("PosixPath", "WindowsPath")),  # not used
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "collections.OrderedDict",
}
_MOST_DIMS = 64
_Places = Mapping[tuple[str, "tuple[int, ...] | None"], Any]  # by name, and where in the tensor


def entries_of(raw: bytes) -> dict[str, Entry]:
    """Parse the pickle, and verify the type of every part of it.

    Raises:
        RuntimeError: it is not metadata, or names something that metadata does not need; nothing in it was executed.
    """
    try:
        top = _fields(read(raw, _ADMITTED, _refuse_persistent), dcp.Metadata)
        paths = top.get("planner_data") or {}
        places = {_key(index): info for index, info in top["storage_data"].items()}
        described = top["state_dict_metadata"].items()
        return {_text(name): _entry(name, _path(paths.get(name, (name,))), x, places) for name, x in described}
    except Exception as error:  # arbitrary bytes raise arbitrary errors
        what = shown(f"{type(error).__name__}: {error}")
        raise RuntimeError(f"not metadata of a checkpoint; nothing in it was executed ({what})") from error


def _refuse_persistent(pid: Any) -> None:
    raise ValueError("it refers to an object outside of the pickle")


def _fields(x: Any, cls: type) -> dict[str, Any]:
    """The attributes of an object of ``cls``."""
    if not _is(x, cls) or not isinstance(x.state, dict):
        raise TypeError(f"got a {getattr(type(x), 'name', type(x).__name__)}, expected a {cls.__name__}")
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
        raise TypeError("a path that is not of strings and integers")
    return path


def _text(x: Any) -> str:
    if type(x) is not str:
        raise TypeError(f"got a {type(x).__name__}, expected a string")
    return x


def _integers(x: Any) -> tuple[int, ...]:
    found = tuple(x.args[0] if _is(x, torch.Size) else x)
    if len(found) > _MOST_DIMS or not all(type(n) is int and n >= 0 for n in found):
        raise ValueError("sizes or offsets that are not non-negative integers, 64 at most")
    return found


def _dtype(properties: Any) -> torch.dtype:
    if not _is(properties, dcp.TensorProperties):
        raise TypeError("not the properties of a tensor")
    named = properties.state[0]
    if not is_class(named) or named.name not in DTYPES:
        raise TypeError("not a torch.dtype")
    return DTYPES[named.name]


def _entry(name: str, path: Path, described: Any, places: _Places) -> Entry:
    if _is(described, dcp.BytesStorageMetadata):
        return Entry(path, (), None, (_value(SCALAR, places[name, None]),))
    fields = _fields(described, dcp.TensorStorageMetadata)
    chunks = [_fields(chunk, dcp.ChunkStorageMetadata) for chunk in fields["chunks"]]
    regions = [Region(_integers(chunk["offsets"]), _integers(chunk["sizes"])) for chunk in chunks]
    values = dict.fromkeys(_value(region, places[name, region.offsets]) for region in regions)  # without duplicates
    return Entry(path, _integers(fields["size"]), _dtype(fields["properties"]), tuple(values))


def _value(region: Region, info: Any) -> Value:
    fields = _fields(info, StorageInfo)
    if fields.get("transform_descriptors"):
        raise ValueError("values with transforms, for example compressed ones, are not supported")
    start, nbytes = _integers((fields["offset"], fields["length"]))
    return Value(region, _text(fields["relative_path"]), start, nbytes)
