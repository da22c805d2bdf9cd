"""Reads values, which ``torch.save`` wrote, without executing or trusting them.

Note [Values]: a value is a zip archive of a pickle and one record of bytes for each storage. The pickle is read into
inert objects (``unpickler``); from these, the functions in ``_MAKERS`` make tensors and plain values, and nothing else
can be made. Records are uncompressed, and all of them together have at most the bytes of the archive, which is inside
its file. So a value takes no more memory than its bytes.
"""

from __future__ import annotations

import io
import os
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from .metadata import Value
from .unpickler import DTYPES, InertObject, is_class, read

_PIECE = 1 << 20  # bytes
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


class Part(io.RawIOBase):
    """The bytes of one value, as a file."""

    def __init__(self, file: IO[bytes], value: Value) -> None:
        self._file, self._value, self._at = file, value, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(offset + (0, self._at, self._value.nbytes)[whence], 0)
        return self._at

    def readinto(self, memory: Any) -> int:
        memory = memoryview(memory)[: max(self._value.nbytes - self._at, 0)]
        self._file.seek(self._value.start + self._at)
        count = self._file.readinto(memory)  # pyright: ignore[reportAttributeAccessIssue]
        self._at += count
        return count


def checksum(path: Path, value: Value) -> int:
    """Return the CRC-32 of the bytes of one value."""
    crc = 0
    with open_regular(path) as file:
        part = Part(file, value)
        while piece := part.read(_PIECE):
            crc = zlib.crc32(piece, crc)
    return crc


def parse(path: Path, value: Value) -> Any:
    """Read one value: a tensor, on the CPU, or a plain value.

    Raises:
        NotPlainError: it contains anything else.
        Exception: any other, where it is not an archive of ``torch.save``.
    """
    with open_regular(path) as file, ZipFile(Part(file, value)) as archive:
        infos = archive.infolist()
        if any(info.compress_type != ZIP_STORED or info.flag_bits & 1 for info in infos):
            raise ValueError("compressed or encrypted: torch.save stores values unchanged")
        if sum(info.file_size for info in infos) > value.nbytes:  # overlapping records
            raise ValueError("an archive whose records have more bytes than it")
        records = _Records(archive, f"{infos[0].filename.partition('/')[0]}/", {})
        return _made(read(archive.read(f"{records.prefix}data.pkl"), _ADMITTED, records.storage), {})


@dataclass(frozen=True)
class _Records:
    """The storages of an archive; ``found``: those that were read."""

    archive: ZipFile
    prefix: str
    found: dict[str, bytearray]

    def storage(self, pid: Any) -> Tensor:
        """Return the numbers of a storage, in one dimension."""
        kind, storage, key, _, numel = pid
        if kind != "storage" or not is_class(storage) or type(key) is not str or type(numel) is not int:
            raise ValueError("not a storage of a tensor")
        dtype, info = _STORAGE_OF[storage.name], self.archive.getinfo(f"{self.prefix}data/{key}")
        if numel * dtype.itemsize != info.file_size:
            raise ValueError(f"{numel} numbers of {storage.name}, which its record does not have")
        if key not in self.found:
            self.found[key] = bytearray(info.file_size)
            with self.archive.open(info) as file:
                file.readinto(self.found[key])  # pyright: ignore[reportAttributeAccessIssue]
        return torch.frombuffer(self.found[key], dtype=dtype) if numel else torch.empty(0, dtype=dtype, device="cpu")


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
        raise ValueError("bytes in another encoding than latin1")
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
