"""One value in a file, as ``torch.save`` wrote it: looked through before torch reads it, for torch believes it.

Note [Values]: torch's reader for ``weights_only=True`` executes nothing, but makes room for what a file claims: it
unpacks compressed records, and calls ``bytearray``. So first the archive's directory is read, where all records must
lie as they are and fit into the bytes that there are; then the pickle, for names and calls that ``torch.save`` never
writes of tensors and plain values. Both are read strictly, so that torch cannot read them in another way.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from struct import unpack
from typing import IO, Any

import torch

from .metadata import Value
from .unpickler import Accepts, Made, read

_ITEMSIZE = {
    **{f"{name}Storage": 1 for name in ("Untyped", "Byte", "Char", "Bool")},
    **{f"{name}Storage": 2 for name in ("Half", "BFloat16", "Short")},
    **{f"{name}Storage": 4 for name in ("Float", "Int")},
    **{f"{name}Storage": 8 for name in ("Double", "Long", "ComplexFloat")},
    "ComplexDoubleStorage": 16,
}
_END, _LOCATOR, _END64 = b"PK\5\6", b"PK\6\7", b"PK\6\6"


def _takes(*types: type) -> Accepts:
    return lambda args: tuple(map(type, args)) == types


_ANY: Accepts = lambda args: True  # noqa: E731
_NEVER: Accepts = lambda args: False  # noqa: E731
_ENCODE: Accepts = lambda args: len(args) == 2 and type(args[0]) is str and args[1] == "latin1"  # noqa: E731
_BYTES: Accepts = lambda args: [getattr(x, "name", "") for x in args] in ([], ["_codecs.encode"])  # noqa: E731
_ADMITTED: dict[tuple[str, str], Accepts] = {
    **{("torch._utils", f"_rebuild_{what}"): _ANY for what in ("tensor", "tensor_v2", "tensor_v3", "parameter")},
    ("torch.serialization", "_get_layout"): _takes(str),
    ("torch", "device"): _ANY,
    ("torch", "Size"): _takes(tuple),
    ("collections", "OrderedDict"): _takes(),
    ("collections", "Counter"): _takes(dict),
    ("_codecs", "encode"): _ENCODE,  # bytes, and with another codec something of any length
    ("builtins", "bytearray"): _BYTES,
    ("builtins", "set"): _takes(list),
    ("builtins", "complex"): _takes(float, float),
}


def load(path: Path, value: Value) -> Any:
    """A tensor on the CPU, or a plain value; no other bytes are read.

    Raises:
        NotPlainError: it would take code to make it.
        Exception: anything, of bytes that are no value.
    """
    with open_regular(path) as file:
        window: Any = _Window(file, value)
        records = _records(window, value.nbytes)
        read(_pickle(window, records), _admits, lambda pid: _check_storage(pid, records))
        window.seek(0)
        try:
            return torch.load(window, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # with advice to load it otherwise
            raise ValueError("a pickle that torch does not read") from None


def open_regular(path: Path) -> IO[bytes]:
    """A regular file of the folder: never what a link points to."""
    return open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb")


def _records(file: IO[bytes], nbytes: int) -> dict[str, zipfile.ZipInfo]:
    """What an archive has, by name without that of the archive."""
    _check_end(file, nbytes)
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
    if any(not _is_stored(info) for info in infos) or sum(info.file_size for info in infos) > nbytes:
        raise ValueError("compressed, or more than its bytes: torch.save stores values as they are")
    prefix = infos[0].orig_filename.partition("/")[0] + "/" if infos else ""
    records = {info.orig_filename.removeprefix(prefix): info for info in infos}
    if len({info.orig_filename.lower() for info in infos}) < len(infos):  # torch would take one of them
        raise ValueError("two records of one name")
    return records


def _check_end(file: IO[bytes], nbytes: int) -> None:
    """One directory, right before the end: programs differ in where else they look for it."""
    file.seek(max(nbytes - 98, 0))
    tail = file.read(98)
    if tail[-22:-18] != _END or tail[-2:] != b"\0\0":
        raise ValueError("no archive as torch.save writes it")
    size, start = unpack("<II", tail[-10:-2])
    end = nbytes - 22
    if tail[-42:-38] == _LOCATOR:
        end = nbytes - 98
        if tail[:4] != _END64 or unpack("<Q", tail[-34:-26])[0] != end:
            raise ValueError("an archive with two directories")
        size, start = unpack("<QQ", tail[40:56])
    if start + size != end:
        raise ValueError("an archive whose directory lies elsewhere")


def _is_stored(info: zipfile.ZipInfo) -> bool:
    extra = info.extra  # nothing, or the one field with sizes above 4 GiB
    plain = not extra or (extra[:2] == b"\1\0" and len(extra) == 4 + int.from_bytes(extra[2:4], "little"))
    stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
    return plain and stored and not info.flag_bits & 1 and info.orig_filename.isascii() and "\0" not in info.filename


def _pickle(file: IO[bytes], records: dict[str, zipfile.ZipInfo]) -> bytes:
    info = records["data.pkl"]
    file.seek(info.header_offset)
    name, extra = unpack("<26xHH", file.read(30))
    file.seek(info.header_offset + 30 + name + extra)
    return file.read(info.file_size)


def _admits(module: str, name: str) -> Accepts | None:
    is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    if is_dtype or (module in ("torch", "torch.storage") and name in _ITEMSIZE):
        return _NEVER
    return _ADMITTED.get(("builtins" if module == "__builtin__" else module, name))  # as protocol 2 spells it


def _check_storage(pid: Any, records: dict[str, zipfile.ZipInfo]) -> None:
    """Memory of a tensor: as many bytes as its record has."""
    kind, storage, key, _, numel = pid
    if kind != "storage" or not issubclass(storage, Made):
        raise ValueError("no storage of a tensor")
    name = storage.name.rpartition(".")[2]
    if type(numel) is not int or numel * _ITEMSIZE[name] != records[f"data/{key}"].file_size:
        raise ValueError(f"{numel} numbers of {name}, which its record has not")


class _Window(io.RawIOBase):
    """The bytes of one value, as a file of their own."""

    def __init__(self, file: IO[bytes], value: Value) -> None:
        self._file, self._start, self._nbytes, self._at = file, value.start, value.nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        self._file.seek(self._start + self._at)
        room = max(self._nbytes - self._at, 0)
        read = self._file.readinto(memoryview(memory)[:room])  # pyright: ignore[reportAttributeAccessIssue]
        self._at += read
        return read

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence], 0)
        return self._at

    def gather_texts(self) -> int:
        return self._at
