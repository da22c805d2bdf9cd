"""The backend of several axes of a mesh of real ranks as one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ..communication.axis import Axis
from ..communication.backend import Backend, DetachedBackend, transport
from ..communication.process_group import GroupBackend
from ..torch_internals.tensors import timeout_of
from .axes import group_axis


def joint_axis(
    axes: Sequence[Axis], names: Sequence[str], backend: Backend, wraps: Sequence[Callable[[Axis], Backend]]
) -> Axis:
    """Return the ranks of the axes ``names`` as one, behind what each of ``wraps`` puts before ``backend``."""
    axis = Axis(",".join(names), prod(axis.size for axis in axes if axis.name in names), backend)
    for wrap in wraps:
        axis = replace(axis, backend=wrap(axis))
    return axis


def joint_backend(
    axes: Sequence[Axis], names: Sequence[str], processes: Sequence[int], device: torch.device
) -> Backend:
    """Return what moves bytes between real ranks of the axes ``names``, which count in row-major order.

    Args:
        axes: all of the mesh.
        names: two or more of them, in the order of the mesh.
        processes: of the mesh's ranks, in row-major order of ``axes``; they make a process group of theirs.
        device: that of the mesh.
    """
    backends = {axis.name: transport(axis.backend) for axis in axes}
    several = [axis.name for axis in axes if axis.name in names and axis.size > 1]
    if len(several) == 1:
        return backends[several[0]]
    index = 0
    for axis in axes:
        index = index * axis.size + int(backends[axis.name].index()) if axis.name in names else index
    if not processes or not several:
        return DetachedBackend(index)
    here = [int(backend.index()) for backend in backends.values()]
    places = product(*(range(axis.size) if axis.name in names else [at] for axis, at in zip(axes, here, strict=True)))
    ranks = dict(zip(product(*(range(axis.size) for axis in axes)), processes, strict=True))
    found = [ranks[place] for place in places]
    if found != sorted(found):  # a process group counts in the order of its processes
        raise NotImplementedError(
            f"mesh[{', '.join(map(repr, names))}]: ranks of processes {found}, expected ascending"
        )
    one = backends[several[0]]
    timeout = timeout_of(one.group) if isinstance(one, GroupBackend) else None
    group: Any = dist.new_group(found, timeout=timeout, use_local_synchronization=True)
    return group_axis("", group, index, len(found), device).backend
