"""The mesh of a job: from a launcher, a process group, or neither."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..communication.backend import Axis, DetachedBackend
from ..errors import axes_text
from ..torch_internals.tensors import set_timeout, timeout_of
from .axes import check_axes, group_axis, is_accelerator, with_index
from .mesh import Mesh


def init_mesh(
    axes: int | Mapping[str, int] | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: timedelta | float | None = None,
) -> Mesh:
    """Return the ranks of this job: under torchrun, in an initialised process group, or one rank without any.

    Args:
        axes: sizes by name, outermost first, or the size of one axis ``"shard"``; one may be ``-1``, what is left.
            Default: ``-1``.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL), also with a number, ``"cuda:1"``, which becomes the current
            device. Unless given: CUDA where there is one, and of a process group that exists, what it was made for.
        timeout: how long a collective waits for other ranks, in seconds or as a ``timedelta``, on every axis; torch's
            default unless given. Only for a process group that is made here: the axes have that of one that exists.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks; the message gives the product. Or a ``timeout``
            without a process group that is made here. Or ``srun`` or ``mpirun`` started several processes, without
            ``RANK`` and ``WORLD_SIZE``: each would be a job of its own. ``init_mesh(1)`` asks for that.
        RuntimeError: later, from a collective of gloo ranks: another rank has ended, or stalled for longer than the
            timeout. The message names it, by its number in the default group. NCCL's own watchdog ends the process.

    Cost:
        Makes a process group per axis, as torch's ``init_device_mesh``.

    Example:
        >>> fs.init_mesh()          # plain python: one rank, no process group
        Mesh(shard=1, cpu)
    """
    from .launching import check_alone, is_launched, make_group

    exists, launched = _has_group(), is_launched()
    where = choose_device(device, dist.get_backend_config() if exists else None, torch.cuda.is_available())
    patience = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    if patience is not None and (exists or not launched):
        raise ValueError(
            "init_mesh: timeout: only of a process group that is made here; init_process_group has it for its own"
        )
    if not exists and not launched:
        if axes != 1 and not (isinstance(axes, Mapping) and set(axes.values()) == {1}):  # it may be one of several
            check_alone()
        sizes = _fill(axes, 1)
        return Mesh(tuple(Axis(name, size, DetachedBackend()) for name, size in sizes.items()), with_index(where))
    sizes = _fill(axes, dist.get_world_size() if exists else int(os.environ["WORLD_SIZE"]))  # before ranks are awaited
    select_device(where, None if exists else os.environ.get("LOCAL_RANK"))
    if not exists:
        make_group(with_index(where), patience)
    made = init_device_mesh(where.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in made.get_all_groups():  # torch made those of several axes with its default
        set_timeout(group, timeout_of(dist.group.WORLD))
    return replace(Mesh.from_device_mesh(made), device=with_index(where))


def choose_device(given: torch.device | str | None, backends: str | None, has_cuda: bool) -> torch.device:
    """Return the device of this rank: CUDA if available, unless the process group has no CUDA backend but gloo."""
    if given is not None:
        return torch.device(given)
    # gloo knows CUDA tensors too, but who asked for gloo asked for the CPU
    by_gloo = backends and dict(pair.split(":") for pair in backends.split(",")).get("cuda", "gloo") == "gloo"
    return torch.device("cuda" if has_cuda and not by_gloo else "cpu")


def select_device(device: torch.device, local_rank: str | None) -> None:
    """Make the accelerator that was asked for, or that of ``LOCAL_RANK``, the current one."""
    if not is_accelerator(device):
        return
    if device.index is not None:
        torch.accelerator.set_device_index(device)
    elif local_rank is not None and not torch.get_device_module(device).is_initialized():
        torch.accelerator.set_device_index(int(local_rank) % torch.accelerator.device_count())


def job_mesh() -> Mesh:
    """Return all ranks of the process group as one axis, in the group that is there; one rank where there is none."""
    if not _has_group():
        return Mesh((Axis("job", 1, DetachedBackend()),), torch.device("cpu"))
    served = dist.get_backend_config()
    device = with_index(torch.device("cpu" if "cpu:" in served else served.partition(":")[0]))
    axis = group_axis("job", dist.group.WORLD, dist.get_rank(), dist.get_world_size(), device)
    return Mesh((axis,), device)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _fill(given: int | Mapping[str, int] | None, num_ranks: int) -> dict[str, int]:
    """Return the sizes with ``-1`` replaced, checked to multiply to ``num_ranks``."""
    axes = {"shard": given} if isinstance(given, int) else given or {"shard": -1}
    rest = [name for name, size in axes.items() if size == -1]
    known = prod(size for size in axes.values() if size != -1)
    sizes = {name: num_ranks // known if [name] == rest and known > 0 else size for name, size in axes.items()}
    check_axes("init_mesh", sizes)
    if (made := prod(sizes.values())) != num_ranks:
        raise ValueError(f"init_mesh: {axes_text(axes)} makes {made} ranks, but there are {num_ranks}")
    return sizes
