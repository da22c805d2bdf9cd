"""Memory kinds: on a device, pinned, or mapped from a file; and tensors of the same kind as another.

Note [Memory kinds]: a shard's gradient and its optimizer state are as large as the shard, so they have the shard's
memory kind. The gradient of a shard on the CPU is copied to the CPU. A tensor made from a memory-mapped shard is mapped
from an unnamed file: it is unlinked as soon as it is mapped, and freed with the tensor, without writing the rest of it
to the disk.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.nn import Parameter

from ..torch_internals.autograd import in_transform

# torch.load(mmap=True) maps files as well: tensors made from those are not mapped.
SUFFIX = ".shard"


@dataclass(frozen=True)
class MemoryKind:
    """The kind of memory of a tensor; ``directory``: of mapped files."""

    device: torch.device
    pinned: bool = False
    directory: Path | None = None

    def put(self, x: Tensor) -> Tensor:
        """Return ``x`` itself if it has this kind of memory, in any directory, or else a copy in it."""
        mapped = self.directory is None or x.numel() == 0 or memory_kind_of(x).directory is not None
        pinned = not self.pinned or x.is_pinned()
        return x if x.device == self.device and mapped and pinned else self.copy(x)

    def copy(self, x: Tensor) -> Tensor:
        """Make a contiguous copy of ``x`` in this kind of memory; it is complete on return."""
        if self.directory is not None and x.numel():
            return _new_unnamed(self.directory, x)
        return self.new(x).copy_(x.detach())

    def new(self, like: Tensor) -> Tensor:
        """Return memory on the device or pinned, of the shape and dtype of ``like``."""
        return torch.empty(like.shape, dtype=like.dtype, device=self.device, pin_memory=self.pinned)


def memory_kind_of(x: Tensor) -> MemoryKind:
    """The memory kind of ``x``; inside a transform only its device, for ``x`` has no memory of its own."""
    if in_transform() or not x.is_cpu or type(x) not in (Tensor, Parameter):
        return MemoryKind(x.device)
    filename = x.untyped_storage().filename
    return MemoryKind(
        x.device, x.is_pinned(), Path(filename).parent if filename and filename.endswith(SUFFIX) else None
    )


def working_device(x: Tensor, device: torch.device) -> torch.device:
    """The device to compute with ``x`` on: ``device``, the mesh's, for a tensor on the CPU."""
    return device if x.is_cpu else x.device


def to_working_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy ``x`` to the device for computation and collectives: NCCL does not take tensors on the CPU."""
    return x.to(working_device(x, device))


def to_memory_kind_of(x: Tensor, given: Tensor) -> Tensor:
    """``x`` in the memory kind of ``given``; under autograd, on the device of ``given``."""
    x = x.to(given.device)
    return x if in_transform() or x.requires_grad else memory_kind_of(given).put(x)


def stacked(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack scalars on the working device; those of one place are stacked there, and copied once."""
    if len({x.device for x in parts}) > 1:
        parts = [to_working_device(x, device) for x in parts]
    return to_working_device(torch.stack([*parts]), device)


def on_each_device(x: Tensor) -> Callable[[torch.device], Tensor]:
    """Return a function of a device that gives ``x`` there, copied once."""
    return cache(lambda device: x.to(device))


def wait_for_copies(tensors: Iterable[Any]) -> None:
    """Wait for asynchronous copies that read from ``tensors``, before they are written to."""
    if not in_transform() and any(isinstance(x, Tensor) and x.is_pinned() for x in tensors):
        torch.accelerator.synchronize()


def _new_unnamed(directory: Path, x: Tensor) -> Tensor:
    """Map an unnamed file with the values of ``x``; a full disk is an error here, and not a SIGBUS at a later write.

    Writes to the file, because each page would cost a fault through the mapping. Measured on ext4, new files of 4 MB:
    1.0 ms of processor time each, 5.0 ms through the mapping, 1.5 ms to fill new memory.
    """
    if not hasattr(os, "posix_fallocate"):
        raise NotImplementedError("offload to files needs os.posix_fallocate, not available on this system. Use 'cpu'.")
    directory.mkdir(parents=True, exist_ok=True)
    path, x = directory / f"{uuid4().hex}{SUFFIX}", x.detach()
    try:
        with path.open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, x.nbytes)
            mapped = torch.from_file(str(path), shared=True, size=x.numel(), dtype=x.dtype, device="cpu")
            path.unlink()
            is_plain = type(x) is Tensor and x.is_cpu and x.is_contiguous() and not (x.is_conj() or x.is_neg())
            plain = x if is_plain else torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x)
            file.write((ctypes.c_char * x.nbytes).from_address(plain.data_ptr()))
        return mapped.view(x.shape)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {x.nbytes:,} bytes needed", str(directory)) from error
    finally:
        path.unlink(missing_ok=True)
