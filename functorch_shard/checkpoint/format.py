"""The format of ``torch.distributed.checkpoint``: which bytes of which file are which elements of which tensor.

Note [Files]: ``__<rank>_0.distcp`` contains the values that one rank wrote, each as ``torch.save`` writes it, one after
the other. ``.metadata``, a pickle, maps each region of each tensor to its value. Both are torch's own. In addition,
``functorch_shard.json``, the manifest, contains the length of each file and a checksum of each value; its first line is
a digest of the rest. A checkpoint of another program does not have one, and only its structure is verified.

Note [Regions]: a shard holds a flat range of a parameter, ``p.flatten()[start:start + numel]``. In ``p`` itself that is
the end of one row, some whole rows and the beginning of another; the rows at both ends are split in the same way, down
to single elements. So in N dims a range is at most ``2 * N - 1`` regions.

Note [Untrusted files]: values are read by ``torch.load(weights_only=True)``. The metadata is read into inert objects,
one class for each name, which have the arguments of the call and the state and do nothing. So is a value before torch
reads it, since a pickle of a few bytes may take exponential time: a tuple that contains one tuple twice, which contains
one twice, and so on, is hashed element by element where it is a key.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple
from zipfile import ZipFile

import torch
from torch.distributed.checkpoint import metadata as dcp

from ..errors import shown
from ..torch_internals.tensors import storage_info

METADATA, MANIFEST, FORMAT = ".metadata", "functorch_shard.json", 1
LARGEST_PLAIN = 1 << 30  # bytes of a plain value, or of what is written beside the elements of a tensor
Path = tuple[str | int, ...]
StorageInfo = storage_info()


class Region(NamedTuple):
    """The elements of a tensor from ``offsets`` up to ``offsets + sizes``; both are empty for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """``p[region.index]`` are the elements, without a copy."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    @staticmethod
    def whole(shape: Sequence[int]) -> Region:
        return Region((0,) * len(shape), tuple(shape))

    def overlap(self, other: Region) -> Region | None:
        """The elements that both contain, in the same coordinates; None without any."""
        both = list(zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        starts = tuple(max(mine, theirs) for mine, _, theirs, _ in both)
        ends = tuple(min(mine + n, theirs + m) for mine, n, theirs, m in both)
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Region(starts, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: Region) -> Region:
        """The same elements in coordinates that start at the offsets of ``outer``."""
        return Region(tuple(mine - start for mine, start in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


SCALAR = Region((), ())


def regions(shape: Sequence[int], start: int, numel: int) -> list[Region]:
    """Split ``p.flatten()[start:start + numel]``, for a ``p`` of this ``shape``, into regions of ``p``, in order."""
    if not numel:
        return []
    if not shape:
        return [SCALAR]
    inner = tuple(shape[1:])
    row = prod(inner)
    i, at = divmod(start, row)
    rows = 0 if at else numel // row
    if rows:
        first, taken = [Region((i, *(0 for _ in inner)), (rows, *inner))], rows * row
    else:
        taken = min(row - at, numel)
        first = [Region((i, *x.offsets), (1, *x.sizes)) for x in regions(inner, at, taken)]
    return first + regions(shape, start + taken, numel - taken)


class Value(NamedTuple):
    """One value in a file: a region of a tensor, or a plain value (``SCALAR``)."""

    region: Region
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Entry:
    """All values under one name. A plain value has ``dtype`` None."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    values: tuple[Value, ...]

    @property
    def nbytes(self) -> int:
        """Of the tensor's elements."""
        return prod(self.shape) * self.dtype.itemsize if self.dtype else 0

    def __str__(self) -> str:
        return "a plain value" if self.dtype is None else f"shape {self.shape}, {self.dtype}"


def dotted(path: Path) -> str:
    """The name of a path; ``"the tree"`` for the empty one."""
    return ".".join(map(str, path)) or "the tree"


def saved(value: Any) -> bytes:
    """The bytes of a value, as ``torch.save`` writes it; raise what :func:`loaded` raises if it reads no value."""
    file = io.BytesIO()
    torch.save(value, file)
    if file.tell() > LARGEST_PLAIN:
        raise ValueError(f"{file.tell():,} bytes, and a plain value has {LARGEST_PLAIN:,} at most")
    loaded(file.getvalue())
    return file.getvalue()


def loaded(raw: bytes) -> Any:
    """Read one value from its bytes, a tensor on the CPU or a plain value; raise any exception for other bytes."""
    with ZipFile(io.BytesIO(raw)) as archive:
        records = archive.infolist()
        if sum(record.file_size for record in records) > len(raw):
            raise ValueError("records of more bytes than the archive: compressed, or on top of each other")
        for record in records:
            if record.filename.endswith("/data.pkl"):
                _Unpickler(archive.read(record)).load()
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)


def metadata_of(indices: Sequence[Mapping[str, Any]]) -> bytes:
    """Make the pickle that describes the files of all ranks, from the index of each."""
    tensors: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, Any] = {}
    paths: dict[str, Path] = {}
    for file, row in [(index["file"], row) for index in indices for row in index["rows"]]:
        offsets, sizes = map(torch.Size, row["region"])
        for path in map(tuple, row["paths"]):
            name, place = dotted(path), dcp.MetadataIndex(dotted(path))
            if row["dtype"] is None:
                tensors[name] = dcp.BytesStorageMetadata()
            else:
                properties = dcp.TensorProperties(dtype=getattr(torch, row["dtype"]))
                entry = dcp.TensorStorageMetadata(properties, torch.Size(row["shape"]), [])
                chunks = tensors.setdefault(name, entry).chunks
                place = dcp.MetadataIndex(name, offsets, len(chunks))
                chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
            paths[name], places[place] = path, StorageInfo(file, row["start"], row["nbytes"])
    return pickle.dumps(dcp.Metadata(tensors, paths, places, dcp.StorageMeta()))


class _Inert:
    """An object named in the metadata; a pickle may set its attributes, and those of its class."""

    name: str
    state: Any = None

    def __new__(cls, *args: Any) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:  # fails for a class, because it needs an instance
        self.state = state


_OF_METADATA = {
    *(f"{x.__module__}.{x.__name__}" for x in vars(dcp).values() if isinstance(x, type)),
    f"{StorageInfo.__module__}.{StorageInfo.__name__}",
    *(f"pathlib{more}.{name}" for more in ("", "._local") for name in ("PosixPath", "WindowsPath")),  # not used
    *("torch.serialization._get_layout", "builtins.getattr"),  # the latter for an enum, in Python 3.11.0 to 3.11.3
}
_IMMUTABLE = {"torch.Size": tuple, "collections.OrderedDict": dict} | {
    f"torch.{name}": x for name, x in vars(torch).items() if isinstance(x, torch.dtype)
}


def _counted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def load_and_count(self: _Unpickler) -> None:
        load(self)
        made = self.stack[-1]
        if type(made) is tuple:
            number = 1 + sum(self.counts.get(id(x), (1, x))[0] for x in made)
            self.counts[id(made)] = number, made
            self.left -= number
            if self.left < 0:
                raise pickle.UnpicklingError("tuples in tuples, with far more elements than the pickle has bytes")

    return load_and_count


class _Unpickler(pickle._Unpickler):
    """The one in Python, which allocates what it reads; that in C allocates what a pickle announces."""

    # Without objects registered with copyreg, which are made without find_class, and a length that is allocated. Those
    # that may make a tuple (t, 1 to 3, and by a call) count its elements: see Note [Untrusted files].
    dispatch: ClassVar = {
        x: _counted(f) if x in b"t\x85\x86\x87R\x81\x92oi" else f
        for x, f in pickle._Unpickler.dispatch.items()
        if x not in b"\x82\x83\x84\x96"
    }
    stack: list[Any]

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self.left = 100 * len(raw)  # elements of tuples, those of tuples inside included
        self.counts: dict[int, tuple[int, Any]] = {}  # by the id of a tuple, which is kept
        self.names: set[str] = set()  # of what became inert objects

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _IMMUTABLE:
            return _IMMUTABLE[full]
        self.names.add(full)
        return type("_Inert", (_Inert,), {"name": full})

    def persistent_load(self, pid: Any) -> Any:
        return None


def entries_of(raw: bytes, file: object = METADATA) -> dict[str, Entry]:
    """Parse the pickle, and verify the type of every part of it, and that it names only what metadata needs."""
    try:
        unpickler = _Unpickler(raw)
        top = _fields(unpickler.load(), dcp.Metadata)
        if others := unpickler.names - _OF_METADATA:
            raise TypeError(f"it names {', '.join(sorted(others))}")
        places: dict[tuple[str, tuple[int, ...] | None], Any] = {}  # by name, and where in the tensor
        for index, info in top["storage_data"].items():
            fields = _fields(index, dcp.MetadataIndex)
            offset = fields.get("offset")
            places[_text(fields["fqn"]), None if offset is None else _integers(offset)] = info
        described = top["state_dict_metadata"].items()
        return {_text(name): _entry(name, x, places) for name, x in described}
    except Exception as error:  # arbitrary bytes raise arbitrary errors
        what = shown(f"{type(error).__name__}: {error}")
        raise RuntimeError(f"{file}: not metadata of a checkpoint; nothing in it was executed ({what})") from error


def _fields(x: Any, cls: type) -> Any:
    """The attributes of an object of ``cls``."""
    if not _is(x, cls) or not isinstance(x.state, (dict, tuple)):
        raise TypeError(f"got a {getattr(type(x), 'name', type(x).__name__)}, expected a {cls.__name__}")
    return x.state


def _is(x: Any, cls: type) -> bool:
    return isinstance(x, _Inert) and x.name == f"{cls.__module__}.{cls.__name__}"


def _text(x: Any) -> str:
    if type(x) is not str:
        raise TypeError(f"got a {type(x).__name__}, expected a string")
    return x


def _integers(x: Any) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in x):
        raise ValueError("sizes or offsets that are not non-negative integers")
    return tuple(x)


def _entry(name: str, described: Any, places: Mapping[tuple[str, tuple[int, ...] | None], Any]) -> Entry:
    if _is(described, dcp.BytesStorageMetadata):
        return Entry((), None, (_value(SCALAR, places[name, None]),))
    fields = _fields(described, dcp.TensorStorageMetadata)
    dtype = _fields(fields["properties"], dcp.TensorProperties)[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("not a torch.dtype")
    chunks = [_fields(chunk, dcp.ChunkStorageMetadata) for chunk in fields["chunks"]]
    found = [Region(_integers(chunk["offsets"]), _integers(chunk["sizes"])) for chunk in chunks]
    values = dict.fromkeys(_value(region, places[name, region.offsets]) for region in found)  # without duplicates
    return Entry(_integers(fields["size"]), dtype, tuple(values))


def _value(region: Region, info: Any) -> Value:
    fields = _fields(info, StorageInfo)
    if fields.get("transform_descriptors"):
        raise ValueError("values with transforms, for example compressed ones, are not supported")
    start, nbytes = _integers((fields["offset"], fields["length"]))
    return Value(region, _text(fields["relative_path"]), start, nbytes)
