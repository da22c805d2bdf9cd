"""The backend of several axes of a mesh as one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ..communication.axis import Axis
from ..communication.backend import Backend, DetachedBackend
from ..communication.group_axis import group_axis
from ..communication.joint import ReorderedBackend
from ..communication.process_group import GroupBackend
from ..communication.wrapper import transport
from ..torch_internals.process_groups import timeout_of


def joint_axis(
    axes: Sequence[Axis], names: Sequence[str], backend: Backend, wraps: Sequence[Callable[[Axis], Backend]]
) -> Axis:
    """The ranks of the axes ``names`` as one, behind what each of ``wraps`` puts before ``backend``."""
    axis = Axis(",".join(names), prod(axis.size for axis in axes if axis.name in names), backend)
    for wrap in wraps:
        axis = replace(axis, backend=wrap(axis))
    return axis


def joint_backend(
    axes: Sequence[Axis], names: Sequence[str], processes: Sequence[int], device: torch.device
) -> Backend:
    """Return what moves bytes between real ranks of the axes ``names``, which count in row-major order of these.

    Args:
        axes: all of the mesh.
        names: two or more of them.
        processes: of the mesh's ranks, in row-major order of ``axes``; they make a process group of theirs.
        device: that of the mesh.
    """
    backends = {axis.name: transport(axis.backend) for axis in axes}
    sizes = {axis.name: axis.size for axis in axes}
    several = [name for name in names if sizes[name] > 1]
    if len(several) == 1:
        return backends[several[0]]
    if not processes or not several:
        index = 0
        for name in names:
            index = index * sizes[name] + int(backends[name].index())
        return DetachedBackend(index)
    return _of_group(backends, sizes, several, processes, device)


def _of_group(
    backends: dict[str, Backend],
    sizes: dict[str, int],
    names: Sequence[str],
    processes: Sequence[int],
    device: torch.device,
) -> Backend:
    """A new process group, made by its ranks alone."""
    mine = {name: int(backend.index()) for name, backend in backends.items()}
    ranks = dict(zip(product(*map(range, sizes.values())), processes, strict=True))
    found = [
        ranks[tuple({**mine, **dict(zip(names, at, strict=True))}.values())]
        for at in product(*(range(sizes[name]) for name in names))
    ]
    one = backends[names[0]]
    timeout = timeout_of(one.group) if isinstance(one, GroupBackend) else None
    group: Any = dist.new_group(sorted(found), timeout=timeout, use_local_synchronization=True)
    backend = group_axis("", group, dist.get_rank(group), prod(sizes[n] for n in names), device).backend
    order = tuple(sorted(found).index(process) for process in found)
    return backend if order == tuple(range(len(order))) else ReorderedBackend(backend, order)
