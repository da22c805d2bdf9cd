"""The axes of a mesh: their sizes, checked, and those of simulated ranks of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from math import prod

import torch
from torch import Tensor

from ..communication.axis import Axis
from ..communication.sequential import Running, SequentialBackend
from ..communication.simulated import StackedBackend
from ..communication.writes import Gathered
from ..errors import axes_text


def sequential_axes(sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    running = Running()
    return tuple(Axis(name, size, SequentialBackend(name, size, running)) for name, size in sizes.items())


def batched_axes(sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    ranks = {name: ContextVar[Tensor | None](name, default=None) for name in sizes}
    others = {name: tuple(var for other, var in ranks.items() if other != name) for name in sizes}
    gathered = ContextVar[Gathered | None]("gathered", default=None)
    return tuple(
        Axis(name, size, StackedBackend(size, ranks[name], gathered, others[name])) for name, size in sizes.items()
    )


def coordinate_of(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Where ``rank`` is on axes of these sizes, in row-major order."""
    return tuple(rank // prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))


KINDS = {"batched": batched_axes, "sequential": sequential_axes}  # of simulated ranks


def with_index(device: torch.device) -> torch.device:
    """Return ``device`` with its number, as tensors have it: an accelerator without one is the current device."""
    numbered = device.index is not None or not is_accelerator(device)
    return device if numbered else torch.device(device.type, torch.accelerator.current_device_index())


def is_accelerator(device: torch.device) -> bool:
    """Whether ``device`` is of the kind of accelerator that this build of torch has."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def check_axes(verb: str, sizes: Mapping[str, int]) -> None:
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes.values()):
        raise ValueError(
            f"{verb}: expected at least one axis, each of size 1 or more, got {axes_text(sizes) or 'none'}"
        )
