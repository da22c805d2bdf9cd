"""The axes of a mesh: sizes and devices, checked, and their ranks as process groups, also of several axes as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from ..communication.backend import Axis, Backend, DetachedBackend
from ..errors import axes_text
from ..torch_internals.tensors import timeout_of

Wrapper = Callable[[Axis], Axis | Backend]


def check_axes(verb: str, sizes: Mapping[str, int]) -> None:
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes.values()):
        raise ValueError(
            f"{verb}: expected at least one axis, each of size 1 or more, got {axes_text(sizes) or 'none'}"
        )


def with_index(device: torch.device) -> torch.device:
    """Return ``device`` with its number, as tensors have it: an accelerator without one is the current device."""
    numbered = device.index is not None or not is_accelerator(device)
    return device if numbered else torch.device(device.type, torch.accelerator.current_device_index())


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` is of the kind of accelerator that this build of torch has."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def backend_of(group: Any, device: torch.device) -> str | None:
    """Return the name of torch's backend for tensors on ``device`` in a process group."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(",")).get(device.type)


def group_axis(name: str, group: Any, rank: int, size: int, device: torch.device) -> Axis:
    """Return the ranks of a process group of torch as an axis, over the fastest backend for tensors on ``device``."""
    if backend_of(group, device) != "gloo":
        from ..communication.process_group import GroupBackend

        return Axis(name, size, GroupBackend(group, rank, size))
    from ..gloo.backend import GlooBackend

    return Axis(name, size, GlooBackend(group, rank, size))


def joint_backend(
    axes: Sequence[Axis], names: Sequence[str], processes: Sequence[int], device: torch.device
) -> Backend:
    """Return what moves bytes between real ranks of the axes ``names``, a process group of some of ``processes``."""
    backends = {axis.name: axis.backend for axis in axes}
    several = [axis.name for axis in axes if axis.name in names and axis.size > 1]
    if len(several) == 1:
        return backends[several[0]]
    here = [int(backend.index()) for backend in backends.values()]
    rows = [range(axis.size) if axis.name in names else [at] for axis, at in zip(axes, here, strict=True)]
    places = [*product(*rows)]  # of the ranks of the joint axis, in its order
    index = places.index(tuple(here))
    if not processes or not several:
        return DetachedBackend(index)
    ranks = dict(zip(product(*(range(axis.size) for axis in axes)), processes, strict=True))
    found = [ranks[place] for place in places]
    if found != sorted(found):  # a process group counts in the order of its processes
        raise NotImplementedError(
            f"mesh[{', '.join(map(repr, names))}]: ranks of processes {found}, expected ascending"
        )
    one = getattr(backends[several[0]], "group", None)
    timeout = timeout_of(one) if one else None
    group: Any = dist.new_group(found, timeout=timeout, use_local_synchronization=True)
    return group_axis("", group, index, len(found), device).backend


def wrapped(axis: Axis, wrap: Wrapper) -> Axis:
    """Return the axis behind what ``wrap`` puts before it."""
    made = wrap(axis)
    if made is axis.backend or isinstance(made, Axis):
        return made if isinstance(made, Axis) else axis
    if axis.is_wrapped:
        raise ValueError(
            f"Mesh.with_backend: axis {axis.name!r} is wrapped already, and nothing would go through that wrap: pass "
            "the backend first, then what stands before it."
        )
    return Axis(axis.name, axis.size, made)
