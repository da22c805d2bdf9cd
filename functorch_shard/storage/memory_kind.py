"""Where a tensor lives: on a device, in pinned memory, in a mapped file. What is made from a shard lives where it does.

Note [Homes]: a shard's gradient and its optimizer state are as large as the shard, so whoever has no room for the one
has none for the others. The gradient of a shard on the CPU is brought to the CPU, and what is made from a shard in a
mapped file is a mapped file too, without a name: unlinked as soon as it is mapped, it is let go with its tensor, and
what of it was not written to the disk by then never will be.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from shutil import disk_usage
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.nn import Parameter

from ..torch_internals.transforms import in_transform

# Only files of this name are homes: torch.load(mmap=True) maps files as well, and what is made from those is plain.
SUFFIX = ".shard"
NAMELESS = "nameless"
_WRITTEN_AT_ONCE = 1 << 22  # elements; what cannot be written from where it is takes as much memory


@dataclass(frozen=True)
class Home:
    """The memory that a tensor lies in; ``directory`` is that of mapped files, which lie one folder further down."""

    device: torch.device
    pinned: bool = False
    directory: Path | None = None

    def put(self, x: Tensor) -> Tensor:
        """``x`` itself where it is at home already, as in any mapped file, or a copy that is."""
        mapped = self.directory is None or x.numel() == 0 or home_of(x).directory is not None
        return x if x.device == self.device and mapped else self.copy(x)

    def copy(self, x: Tensor) -> Tensor:
        """A contiguous copy of ``x`` in this kind of memory, complete when this returns."""
        if self.directory is not None and x.numel():
            return _new_nameless(self.directory, x)
        return torch.empty(x.shape, dtype=x.dtype, device=self.device, pin_memory=self.pinned).copy_(x.detach())


def home_of(x: Tensor) -> Home:
    """Inside a transform a tensor has no memory of its own, and only its device is known."""
    if in_transform() or not x.is_cpu or type(x) not in (Tensor, Parameter):
        return Home(x.device)
    return Home(x.device, x.is_pinned(), _directory(x.untyped_storage().filename))


def _directory(filename: str | None) -> Path | None:
    return Path(filename).parent.parent if filename and filename.endswith(SUFFIX) else None


def working_device(x: Tensor, device: torch.device) -> torch.device:
    """Where to compute with ``x`` on a mesh of ``device``: the CPU's shards are moved there."""
    return device if x.is_cpu else x.device


def near(x: Tensor, device: torch.device) -> Tensor:
    """``x`` where to compute with it, and where its ranks can talk: NCCL knows no tensor in the CPU's memory."""
    return x.to(working_device(x, device))


def back_home(x: Tensor, given: Tensor) -> Tensor:
    """``x``, which was made of ``given``, in the kind of memory that ``given`` has; with a graph, on its device."""
    x = x.to(given.device)
    return x if in_transform() or x.requires_grad else home_of(given).put(x)


def settle(tensors: Iterable[Any]) -> None:
    """Wait until no copy under way reads from ``tensors``, which are about to be written to."""
    if not in_transform() and any(isinstance(x, Tensor) and x.is_pinned() for x in tensors):
        torch.cuda.synchronize()


def nbytes_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def new_file(path: Path, nbytes: int) -> None:
    """A file of zeros that has its blocks from the start.

    So a full disk is an error here, and not a signal that ends the process when the tensor is written to.
    """
    if not hasattr(os, "posix_fallocate"):
        raise NotImplementedError("offload to files needs os.posix_fallocate, which this system has not. Use 'cpu'.")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if nbytes:
            os.posix_fallocate(handle, 0, nbytes)
    finally:
        os.close(handle)


def fill_file(path: Path, x: Tensor) -> Tensor:
    """The values of ``x`` in the file that was made for them, mapped.

    By writes to the file: through the mapping each page would cost a fault. Measured on ext4, new files of 4 MB: 1.0 ms
    of processor time each, 5.0 ms through the mapping, 1.5 ms for as much new memory.
    """
    with path.open("r+b", buffering=0) as file:
        write_numbers(file, x)
    return map_file(path, x.shape, x.dtype)


def write_numbers(file: FileIO, x: Tensor) -> None:
    """The numbers of ``x``, row-major, from where ``file`` stands."""
    for part in x.detach().reshape(-1).split(_WRITTEN_AT_ONCE) if x.numel() else ():
        _write_all(file, _plain(part))


def _write_all(file: FileIO, x: Tensor) -> None:
    memory = memoryview((ctypes.c_char * nbytes_of(x)).from_address(x.data_ptr())).cast("B")
    written = 0
    while written < len(memory):
        written += file.write(memory[written:])


def _plain(x: Tensor) -> Tensor:
    """``x`` with its numbers as bytes one after the other: itself, or a copy of what lies otherwise or elsewhere."""
    if type(x) is Tensor and x.is_cpu and x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x)


def map_file(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor that a file of exactly its size holds; writing to it writes to the file."""
    numel = prod(shape)
    if not numel:  # there is nothing to map
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_file(str(path), shared=True, size=numel, dtype=dtype, device="cpu").view(shape)


def _new_nameless(directory: Path, x: Tensor) -> Tensor:
    folder = directory / NAMELESS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{uuid4().hex}{SUFFIX}"
    try:
        new_file(path, nbytes_of(x))
        return fill_file(path, x)
    except OSError as error:
        raise no_room(error, directory, nbytes_of(x), "what is made from a shard in a file") from error
    finally:
        path.unlink(missing_ok=True)


def no_room(error: OSError, directory: Path, needed: int, what: str) -> OSError:
    """``error``, of the same kind and number, with what was asked for and what there is."""
    free = disk_usage(directory).free
    text = f"{what}: {directory}: {needed:,} bytes needed, {free:,} bytes free there: {error.strerror}"
    return OSError(error.errno, text)
