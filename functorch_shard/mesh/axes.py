"""The axes of a mesh: their sizes, checked, and what a kind of simulated ranks has to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..communication.axis import Axis
from ..communication.backend import Backend
from ..communication.process_group import GroupBackend
from ..errors import axes_text


class Simulated(ABC):
    """Ranks inside this process: their axes, and how a function runs as each of them."""

    kind: str
    axes: tuple[Axis, ...]

    @abstractmethod
    def spmd(
        self, fn: Callable[..., Any], in_dims: Any, out_dims: Any, randomness: str, device: torch.device
    ) -> Callable[..., Any]:
        """Return what runs ``fn`` as every rank; arguments and results have rank dims."""

    @abstractmethod
    def watch(self, key: str, whole: Tensor, names: Sequence[str]) -> None:
        """Have writes into a whole buffer refused when ``spmd`` ends."""

    @abstractmethod
    def joint(self, names: Sequence[str]) -> Backend:
        """Return the backend of several axes as one, whose ranks count in row-major order of ``names``."""


def group_axis(name: str, group: Any, rank: int, size: int, device: torch.device) -> Axis:
    """Return the ranks of a process group of torch as an axis, over the fastest backend for tensors on ``device``."""
    config = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if config.get(device.type) != "gloo":
        return Axis(name, size, GroupBackend(group, rank, size))
    from ..gloo.backend import GlooBackend

    return Axis(name, size, GlooBackend(group, rank, size))


def coordinate_of(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Where ``rank`` is on axes of these sizes, in row-major order."""
    return tuple(rank // prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))


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
