"""Memory kinds: on a device, or pinned on the host; and tensors of the same kind as another.

Note [Memory kinds]: a shard's gradient and its optimizer state are as large as the shard, so they have the shard's
memory kind. The gradient of a shard on the CPU is copied to the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..torch_internals.autograd import in_transform


@dataclass(frozen=True)
class MemoryKind:
    """The kind of memory of a tensor."""

    device: torch.device
    pinned: bool = False

    def put(self, x: Tensor) -> Tensor:
        """Return ``x`` itself if it has this kind of memory, or else a copy in it."""
        return x if x.device == self.device and (not self.pinned or x.is_pinned()) else self.copy(x)

    def copy(self, x: Tensor) -> Tensor:
        """Make a contiguous copy of ``x`` in this kind of memory; it is complete on return."""
        return self.new(x).copy_(x.detach())

    def new(self, like: Tensor) -> Tensor:
        """Return memory of this kind, of the shape and dtype of ``like``."""
        return torch.empty(like.shape, dtype=like.dtype, device=self.device, pin_memory=self.pinned)


def memory_kind_of(x: Tensor) -> MemoryKind:
    """The memory kind of ``x``; inside a transform only its device, for ``x`` has no memory of its own."""
    pinned = not in_transform() and x.is_cpu and type(x) in (Tensor, Parameter) and x.is_pinned()
    return MemoryKind(x.device, pinned)


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


def wait_for_copies(tensors: Iterable[Any]) -> None:
    """Wait for asynchronous copies that read from ``tensors``, before they are written to."""
    if not in_transform() and any(isinstance(x, Tensor) and x.is_pinned() for x in tensors):
        torch.accelerator.synchronize()
