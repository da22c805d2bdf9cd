"""Reads values, which ``torch.save`` wrote, without executing or trusting them.

Note [Values]: a value is a zip archive of a pickle and one record of bytes for each storage. The pickle is read into
inert objects (``unpickler``); from these, the functions in ``_MAKERS`` make tensors and plain values, and nothing else
can be made. Records have to be uncompressed and inside the archive, and a tensor shares the memory that the archive
was read into. So a value takes no more memory than its bytes.
"""

from __future__ import annotations

import os
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import unpack_from
from typing import IO, Any

import torch
from torch import Tensor

from .metadata import Value
from .unpickler import DTYPES, InertObject, is_class, read

_STORAGES = (
    {"Untyped": torch.uint8, "Byte": torch.uint8, "Char": torch.int8, "Bool": torch.bool}
    | {"Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64}
    | {"Short": torch.int16, "Int": torch.int32, "Long": torch.int64}
    | {"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128}
)
_STORAGE_OF = {f"{module}.{name}Storage": x for name, x in _STORAGES.items() for module in ("torch", "torch.storage")}
_LAYOUTS = {str(x): x for x in vars(torch).values() if isinstance(x, torch.layout)}


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file; a symbolic link is an error."""
    return open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb")


def read_bytes(path: Path, value: Value) -> bytearray:
    """Read the bytes of one value; fewer, if the file is shorter."""
    raw = bytearray(value.nbytes)
    with open_regular(path) as file:
        file.seek(value.start)
        del raw[file.readinto(raw) :]  # pyright: ignore[reportAttributeAccessIssue]
    return raw


def parse(raw: bytearray) -> Any:
    """Make the tensor, on the CPU, or the plain value that ``raw`` holds. A tensor shares the memory of ``raw``.

    Raises:
        NotPlainError: it contains anything else.
        Exception: any other, where ``raw`` is not an archive of ``torch.save``.
    """
    archive = _Archive.of(raw)
    return _made(read(bytes(archive.record("data.pkl")), _ADMITTED, archive.storage), {})


@dataclass(frozen=True)
class _Archive:
    raw: bytearray
    records: Mapping[str, zipfile.ZipInfo]  # by name, without that of the archive

    @staticmethod
    def of(raw: bytearray) -> _Archive:
        with zipfile.ZipFile(_MemoryFile(raw)) as archive:
            infos = archive.infolist()
        if _is_ambiguous(raw, infos):
            raise ValueError("not an archive as torch.save writes it")
        if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in infos):
            raise ValueError("compressed or encrypted: torch.save stores values as they are")
        prefix = infos[0].orig_filename.partition("/")[0] + "/"
        return _Archive(raw, {info.orig_filename.removeprefix(prefix): info for info in infos})

    def record(self, name: str) -> memoryview:
        info = self.records[name]
        length_of_name, length_of_extra = unpack_from("<26xHH", self.raw, info.header_offset)
        start = info.header_offset + 30 + length_of_name + length_of_extra
        found = memoryview(self.raw)[start : start + info.file_size]
        if len(found) != info.file_size:
            raise ValueError(f"record {name!r} is outside of the archive")
        return found

    def storage(self, pid: Any) -> Tensor:
        """The numbers of a storage, in one dimension."""
        kind, storage, key, _, numel = pid
        if kind != "storage" or not is_class(storage):
            raise ValueError("not a storage of a tensor")
        dtype, data = _STORAGE_OF[storage.name], self.record(f"data/{key}")
        if type(numel) is not int or numel * dtype.itemsize != len(data):
            raise ValueError(f"{numel} numbers of {storage.name}, which its record does not have")
        return torch.frombuffer(data, dtype=dtype) if numel else torch.empty(0, dtype=dtype, device="cpu")


def _is_ambiguous(raw: bytearray, infos: list[zipfile.ZipInfo]) -> bool:
    """Whether programs would read other records: some search for the directory elsewhere, some take the first of two.

    The directory has to be followed by the end records alone, the records have to begin with the archive.
    """
    locator = raw[-42:-22]
    astray = locator[:4] == b"PK\6\7" and locator[8:16] != (len(raw) - 98).to_bytes(8, "little", signed=True)
    around = raw[-22:-18] != b"PK\5\6" or raw[-2:] != b"\0\0" or min(info.header_offset for info in infos) != 0
    return astray or around or len({info.orig_filename.lower() for info in infos}) < len(infos)


class _MemoryFile:
    """Reads from memory like a file; ``io.BytesIO`` of a bytearray would copy it."""

    def __init__(self, raw: bytearray) -> None:
        self._raw, self._at = memoryview(raw), 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(offset + (0, self._at, len(self._raw))[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        start, self._at = self._at, len(self._raw) if size < 0 else self._at + size
        return bytes(self._raw[start : self._at])


def _made(x: Any, made: dict[int, Any]) -> Any:
    """``x`` with tensors and plain values in the place of inert objects; ``made``: what is done, by ``id``."""
    if id(x) not in made:
        made[id(x)] = _make(x, lambda inner: _made(inner, made))
    return made[id(x)]


def _make(x: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(x, InertObject):
        return _MAKERS[x.name](*map(of, x.args))
    if is_class(x):
        return DTYPES[x.name]
    if isinstance(x, dict):
        return (OrderedDict if isinstance(x, OrderedDict) else dict)((of(key), of(item)) for key, item in x.items())
    return type(x)(map(of, x)) if isinstance(x, (list, tuple, set, frozenset)) else x


def _tensor(x: Tensor, offset: int, size: Any, stride: Any, grad: bool = False, _: Any = None, bits: Any = None) -> Any:
    x = x.as_strided(size, stride, offset)
    for bit, undo in (("conj", torch.conj), ("neg", torch.neg)):
        x = undo(x) if bits and bits.get(bit) else x
    return x.requires_grad_(grad)


def _tensor_of_dtype(x: Tensor, offset: int, size: Any, stride: Any, grad: bool, _: Any, dtype: Any, *bits: Any) -> Any:
    return _tensor(x.view(dtype), offset, size, stride, grad, None, *bits)


def _parameter(x: Tensor, grad: bool, _: Any) -> Tensor:
    return torch.nn.Parameter(x, grad)


def _bytes(text: str, codec: str) -> bytes:
    if codec != "latin1":  # others can make many bytes of few
        raise ValueError(f"bytes encoded by {codec!r}, expected 'latin1'")
    return text.encode("latin1")


def _taking(cls: Callable[..., Any], argument: type) -> Callable[..., Any]:
    """``cls`` of at most one argument of this type: an int is a length, and iteration over a tensor may not end."""

    def make(*args: Any) -> Any:
        if [type(x) for x in args] not in ([], [argument]):
            raise ValueError(f"{cls.__name__}: got {len(args)} arguments, expected a {argument.__name__}")
        return cls(*args)

    return make


_MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.serialization._get_layout": _LAYOUTS.__getitem__,
    "torch.device": torch.device,
    "torch.Size": _taking(torch.Size, tuple),
    "collections.Counter": _taking(Counter, dict),
    "_codecs.encode": _bytes,
    "builtins.bytearray": _taking(bytearray, bytes),
    "builtins.set": _taking(set, list),
    "builtins.complex": complex,
}
_ADMITTED = {*_MAKERS, *_STORAGE_OF, *DTYPES, "collections.OrderedDict"}
