"""The ranks: real ones over a process group, or simulated ones as a batch dim of this process.

Note [Ranks as a batch axis]: on a simulated mesh ``spmd`` is ``torch.func.vmap`` over the ranks, one level per axis,
and the vmap rule of a collective *is* the communication. Each level carries the rank index as a tensor batched at that
level alone; a collective takes it as an operand, and so tells the level of its axis from the user's own vmaps. JAX's
``vmap(axis_name=...)`` is the same idea.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .agreement import agree, gather_texts
from .backend import Backend, DetachedBackend, StackedBackend, record, set_timeout, timeout_of
from .containers import Static
from .errors import axes_text
from .failures import naming_lost_ranks
from .gloo import group_backend
from .launchers import Job, job_of
from .rendezvous import join_job
from .spmd import split_tensor, spmd
from .writes import Gathered

Fn = TypeVar("Fn", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Axis:
    """One named direction of a mesh, as ``mesh["shard"]``: what a collective communicates over."""

    name: str
    size: int
    backend: Backend = field(repr=False)
    folded: int = field(default=1, repr=False)  # values of other simulated ranks inside an operand; see collectives

    def __reduce__(self) -> tuple[Any, ...]:
        # A process group does not travel; a simulated axis is pickled with its mesh.
        rank = 0 if self.backend.simulated else int(self.backend.index())
        return Axis, (self.name, self.size, DetachedBackend(rank))

    def announce(self, kind: str, numel: int, dtype: torch.dtype, key: str = "") -> None:
        """Tell whoever listens that each rank is about to pass ``numel`` elements to a collective."""
        record(kind, self.name, numel, dtype)
        self.backend.announce(kind, numel, dtype, key)


@dataclass(frozen=True, eq=False, repr=False)
class Mesh(Static):
    """The ranks of a program, in one or more named axes.

    Made by :func:`init_mesh`, :func:`simulated_mesh` or :meth:`from_device_mesh`; an immutable handle. Ranks count in
    row-major order of the axes. Copying keeps the handle; pickling keeps names and sizes, and real ranks stay behind.
    """

    _axes: tuple[Axis, ...]
    device: torch.device
    processes: tuple[int, ...] = ()  # numbers in the default group, in rank order; none: simulated or unpickled
    device_mesh: DeviceMesh | None = None  # what it was made from

    @property
    def axes(self) -> dict[str, int]:
        """The size of each axis, by name, outermost first."""
        return {axis.name: axis.size for axis in self._axes}

    @property
    def size(self) -> int:
        """The number of ranks: the product of the axes."""
        return prod(self.axes.values())

    @property
    def is_simulated(self) -> bool:
        """Whether the ranks are a batch dim of this process."""
        return any(axis.backend.simulated for axis in self._axes)

    @property
    def in_spmd(self) -> bool:
        """Whether code here runs as one of the ranks: always on real ranks, inside ``spmd`` on simulated ones."""
        return all(backend.ranks.get() is not None for backend in self._stacked())

    def __getitem__(self, name: str) -> Axis:
        for axis in self._axes:
            if axis.name == name:
                return axis
        raise KeyError(f"{name!r}: the mesh has the axes {axes_text(self.axes)}")

    def __iter__(self) -> Any:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    @overload
    def spmd(self, fn: Fn, /, *, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "different") -> Fn: ...
    @overload
    def spmd(
        self, fn: None = None, /, *, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "different"
    ) -> Callable[[Fn], Fn]: ...
    def spmd(self, fn: Any = None, /, *, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "different") -> Any:
        """Run ``fn`` as a single program on every rank.

        On real ranks every process is already one of them: ``spmd(fn)`` is ``fn`` itself. On simulated ranks it is
        ``fn`` under one vmap per axis: tensors are mapped, everything else is passed through, in both directions.

        Args:
            fn: what each rank does; per-rank tensors in, per-rank tensors out. Without it, a decorator.
            in_dims: where the rank dims of each positional argument start, as in ``torch.func.vmap``: an int, or a
                tuple of trees. ``None``: the same on every rank, no rank dims. Keyword arguments are mapped at 0.
            out_dims: where the rank dims of each result go. ``None``: the same on every rank, returned once.
            randomness: as in vmap, for simulated ranks, which draw from one generator: ``"different"`` draws something
                else on every rank, ``"same"`` alike. A real rank draws from its own generator, whatever this says: seed
                them apart after :func:`shard`, ``torch.manual_seed(1 + mesh.rank)``, or leave them alike for the same.

        Returns:
            A function whose tensors carry one rank dim per axis, in the mesh's order.

        Arguments and results may be any pytrees. Their containers are those that optree knows, and besides them
        dataclasses, mappings (``UserDict``, ``OrderedDict`` and their subclasses), subclasses of list and tuple, and
        what is registered in ``torch.utils._pytree``.

        Differentiate inside: a transform around ``spmd`` sees all ranks at once. There ``fs.grad`` is the derivative of
        what is returned, and under ``torch.func``'s own transforms the reduction of ``gather`` still applies, so the
        gradient of a sum over ranks is the gradient of the mean.

        Raises:
            ValueError: a tensor has no rank dims of the right sizes, or a result for ``out_dims=None`` differs.
            TypeError: an argument, or the result, has tensors inside of an object that is no such container. Modules,
                functions and optimizers are passed through.
            RuntimeError: called inside ``spmd`` of the same mesh. Or simulated ranks cannot do it because they are a
                vmap (an ``if`` on values, buffers that are written to, a checkpoint): the message says what instead.
            NotImplementedError: ``fn`` is differentiated through ``torch.utils.checkpoint``, on simulated ranks.

        Cost:
            No collectives of its own. One process does the work of all ranks.

        Example:
            >>> mesh = fs.simulated_mesh(2)
            >>> rows = torch.tensor([[1, 2], [10, 20]])   # row r = rank r
            >>> mesh.spmd(lambda x: x - fs.collectives.pmean(x, mesh))(rows)
            tensor([[-4.5000, -9.0000],
                    [ 4.5000,  9.0000]])
        """
        if fn is None:
            return lambda fn: self.spmd(fn, in_dims=in_dims, out_dims=out_dims, randomness=randomness)
        return spmd(fn, self._stacked(), in_dims, out_dims, randomness, self.device) if self.is_simulated else fn

    def split(self, tree: Any, dim: int = 0) -> Any:
        """This rank's part of a global batch: rank r of N gets the r-th of N equal parts of ``dim``.

        Args:
            tree: a tensor or a pytree; its tensors are split, everything else is passed through. Containers may be
                dataclasses, mappings such as ``UserDict``, and others: see ``spmd``.
            dim: the dimension to split, divisible by ``mesh.size``.

        Returns:
            Real ranks: views with ``dim`` divided by ``mesh.size``. Simulated ranks: the parts of all ranks, with one
            leading rank dim per axis, as ``spmd`` takes them; inside ``spmd`` a copy of this rank's part.

        Raises:
            ValueError: a tensor whose ``dim`` is not divisible; the message names all of them.
            TypeError: no tensor in the tree, or tensors or arrays where no tree can reach them, named by type and path.

        Example:
            >>> fs.simulated_mesh(2).split(torch.arange(6))
            tensor([[0, 1, 2],
                    [3, 4, 5]])
        """
        return split_tensor(tree, self.size, dim, self._part)

    def _part(self, rows: Tensor) -> Tensor:
        """Of values of all ranks in dim 0: those that code here sees."""
        if not self.is_simulated:
            return rows[self.rank]
        if not self.in_spmd:
            return rows.unflatten(0, tuple(self.axes.values()))
        index: Any = 0
        for axis in self._axes:
            index = index * axis.size + axis.backend.index()
        return rows.index_select(0, index.reshape(1)).squeeze(0)  # a batched index is no number to subscript with

    @property
    def rank(self) -> int:
        """This process's rank on a real mesh, in row-major order of the axes; 0 on a simulated one.

        Raises:
            RuntimeError: inside ``spmd`` on simulated ranks, as :attr:`coordinate`.
        """
        rank = 0
        for axis, index in zip(self._axes, self.coordinate, strict=True):
            rank = rank * axis.size + index
        return rank

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This process's position on each axis of a real mesh; zeros on a simulated one.

        Raises:
            RuntimeError: inside ``spmd`` on simulated ranks, where one run is every rank, and none has a number that
                Python could see. ``fs.collectives.axis_index(mesh)`` is the rank as a tensor, on real ranks too.
        """
        if any(backend.ranks.get() is not None for backend in self._stacked()):
            raise RuntimeError(
                "mesh.rank and mesh.coordinate: inside spmd on simulated ranks this line runs once for all of them, so "
                "no number is right for each. fs.collectives.axis_index(mesh) is the rank as a tensor, on real ranks "
                "too; what one rank alone does, as printing, do outside of spmd, where mesh.rank is 0."
            )
        return tuple(0 if axis.backend.simulated else int(axis.backend.index()) for axis in self._axes)

    def through(self, wrap: Callable[[Axis], Backend]) -> Mesh:
        """A handle of the same ranks whose collectives go through other backends: to count, check, replace or skip.

        Everything that is planned on it, or put on it by ``layout.on``, communicates that way; this handle stays as it
        is. Pickles keep neither ranks nor backends.

        Args:
            wrap: from an axis to the backend it is to have, as ``fs.communication.checked`` or a
                ``fs.communication.Counter``: one that stands before ``axis.backend``, or that itself, to leave the axis
                alone.

        Returns:
            A mesh of the same axes. Wrapped again, the last wrap is asked first.

        Raises:
            TypeError: ``wrap`` returned something else than a ``fs.communication.Backend``.

        Cost:
            That of ``wrap``. All ranks have to wrap alike.

        Example:
            >>> counter = fs.communication.Counter()
            >>> mesh = fs.simulated_mesh({"replicate": 2, "shard": 2}).through(counter)
            >>> _ = mesh.spmd(lambda x: fs.collectives.psum(x, mesh))(torch.ones(2, 2, 3))
            >>> [(axis, kind, seen.number, seen.nbytes) for (axis, kind), seen in counter.traffic.items()]
            [('replicate', 'psum', 1, 12), ('shard', 'psum', 1, 12)]
        """
        return replace(self, _axes=tuple(replace(axis, backend=_checked_backend(wrap(axis))) for axis in self._axes))

    def agree(self, verb: str, build: Callable[[], T], describe: Callable[[T], Sequence[str]], *advice: str) -> T:
        """``build()``, made sure to be the same on every rank; see ``agreement.agree``."""
        real = self._several()
        return agree(verb, build, describe, real, self.device, *advice) if real else build()

    def tell(self, text: str) -> list[str]:
        """``text`` of every real rank, in rank order; see ``agreement.gather_texts``. Of simulated ranks, the one."""
        real = self._several()
        return gather_texts(text, real, self.device) if real else [text]

    @staticmethod
    def from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
        """The ranks of a torch ``DeviceMesh``; its dims need names.

        Of a device mesh with a tensor axis, take the slice of the data axes, ``device_mesh["shard"]``: parameters may
        be DTensors over the other axes.

        Raises:
            ValueError: the device mesh has no ``mesh_dim_names``.
        """
        names, coordinate = device_mesh.mesh_dim_names, device_mesh.get_coordinate()
        if names is None or coordinate is None:
            raise ValueError(
                "Mesh.from_device_mesh: expected a device mesh with mesh_dim_names that contains this rank, got "
                f"{device_mesh}. Pass mesh_dim_names=('shard',) or ('replicate', 'shard') to init_device_mesh."
            )
        sizes, device = device_mesh.shape, _with_index(torch.device(device_mesh.device_type))
        places = zip(names, coordinate, sizes, strict=True)
        groups = [group_backend(device_mesh.get_group(name), rank, size, device) for name, rank, size in places]
        backends = [naming_lost_ranks(group, name) for group, name in zip(groups, names, strict=True)]
        axes = tuple(Axis(name, size, backend) for name, size, backend in zip(names, sizes, backends, strict=True))
        processes = tuple(device_mesh.mesh.flatten().tolist())
        return Mesh(axes, device, processes, device_mesh)

    def beside(self, *names: str) -> Mesh:
        """The ranks along other axes of the device mesh that this one is a slice of, as ``mesh.beside("tensor")``.

        Raises:
            KeyError: the mesh is no slice of a device mesh with these axes.
        """
        # Private, but a slice has no public way to its siblings (tests/distributed/test_tensor_parallel.py watches).
        whole = None if self.device_mesh is None else self.device_mesh._get_root_mesh()
        if whole is None or not set(names) <= set(whole.mesh_dim_names or ()):
            raise KeyError(
                f"{self} has no axes {', '.join(map(repr, names))} beside it. Make it from a slice of the device mesh "
                "that has all axes, as Mesh.from_device_mesh(device_mesh['shard'])."
            )
        return Mesh.from_device_mesh(whole[names])

    def watch(self, key: str, whole: Tensor, names: Sequence[str]) -> None:
        """Have writes into a whole buffer refused when ``spmd`` ends; real ranks refuse them at once."""
        for backend in self._stacked()[:1]:
            if gathered := backend.gathered.get():
                gathered.add(key, whole, names)

    def _several(self) -> list[Backend]:
        return [axis.backend for axis in self._axes if axis.size > 1 and not axis.backend.simulated]

    def _stacked(self) -> list[StackedBackend]:
        carriers = [axis.backend.carrier for axis in self._axes]
        return [carrier for carrier in carriers if isinstance(carrier, StackedBackend)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_simulated:
            return partial(simulated_mesh, self.axes, device=self.device), ()
        return Mesh, (self._axes, self.device)

    def __repr__(self) -> str:
        kind = "simulated, " if self.is_simulated else ""
        return f"Mesh({axes_text(self.axes)}, {kind}{self.device})"


def simulated_mesh(axes: int | Mapping[str, int], *, device: torch.device | str | None = None) -> Mesh:
    """Ranks inside this process: the same program, no process group, true values, every transform.

    Args:
        axes: the number of ranks of one axis ``"shard"``, or sizes by name, outermost first.
        device: where ``shard`` puts values; torch's default device unless given.

    Raises:
        ValueError: a size below 1, or no axis.

    Example:
        >>> fs.simulated_mesh({"replicate": 2, "shard": 4}).size
        8
    """
    sizes = {"shard": axes} if isinstance(axes, int) else dict(axes)
    _check_axes("simulated_mesh", sizes)
    where = torch.get_default_device() if device is None else torch.device(device)
    return Mesh(_simulated_axes(sizes), where)


def init_mesh(
    axes: int | Mapping[str, int] | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: timedelta | float | None = None,
) -> Mesh:
    """All ranks of this job: under torchrun, in an initialised process group, or one rank without any.

    Processes that ``srun`` or ``mpirun`` started are the ranks of a job where ``MASTER_ADDR`` and ``MASTER_PORT`` say
    how they find each other, and are refused otherwise: each would be a job of its own. ``init_mesh(1)`` asks for that.

    Args:
        axes: sizes by name, outermost first, or the size of one axis ``"shard"``; one may be ``-1``, what is left.
            Default: ``-1``.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL), also with a number, ``"cuda:1"``, which becomes the current
            device. Unless given: CUDA where there is one, and of a process group that exists, what it was made for.
            Under torchrun the process group is made here; one that exists is used as it is.
        timeout: how long a collective waits for other ranks, in seconds or as a ``timedelta``, on every axis; torch's
            default (gloo 30 minutes, NCCL 10) unless given. Only for a process group that is made here: the axes have
            that of one that exists.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks; the message gives the product. Or a ``timeout``
            that is not above 0, or that comes with a process group that exists or without one. Or a ``device`` that the
            process group has no backend for. Or a launcher started several processes, or set only one of ``RANK`` and
            ``WORLD_SIZE``, and does not say how the ranks find each other; the message has the torchrun line.
        RuntimeError: ranks of the job did not come within ``timeout``; every other one names them. Or later, from a
            collective of gloo ranks: another rank has ended, or stalled for longer than the timeout. It names that
            rank, by its number in the default group, with torch's error as its cause, up to a tenth of the timeout
            later (at least 2 s and at most 10); rank 0 may take twice that. NCCL's own watchdog ends the process
            instead, unless torch is told to raise.

    Cost:
        Makes a process group per axis, as torch's ``init_device_mesh``.

    Example:
        >>> fs.init_mesh()          # plain python: one rank, no process group
        Mesh(shard=1, cpu)
    """
    job = None if _has_group() else job_of(os.environ, alone=_asks_for_one(axes))
    several = job is not None or _has_group()
    where = choose_device(device, dist.get_backend_config() if _has_group() else None, torch.cuda.is_available())
    patience = _patience(timeout, several)
    if not several:
        sizes = _fill(axes, 1)
        return Mesh(tuple(Axis(name, size, DetachedBackend()) for name, size in sizes.items()), _with_index(where))
    select_device(where, job)
    if job is not None:
        join_job(job, "nccl" if where.type == "cuda" else "gloo", patience)
    sizes = _fill(axes, dist.get_world_size())
    made = init_device_mesh(where.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in made.get_all_groups():  # torch made those of several axes with its default
        set_timeout(group, timeout_of(dist.group.WORLD))
    return replace(Mesh.from_device_mesh(made), device=_with_index(where))


def choose_device(given: torch.device | str | None, backends: str | None, has_cuda: bool) -> torch.device:
    """Where the ranks of a job work: CUDA where there is one, unless the process group does not speak for it.

    Args:
        given: what the user asked for.
        backends: of a process group that exists, as ``torch.distributed.get_backend_config()`` gives them.
        has_cuda: whether this machine has CUDA.

    Raises:
        ValueError: ``given`` is a device for which the process group has no backend.
    """
    served = None if backends is None else dict(pair.split(":") for pair in backends.split(","))
    if given is None:  # gloo knows CUDA tensors too, but who asked for gloo asked for the CPU
        cuda = has_cuda and (served is None or served.get("cuda", "gloo") != "gloo")
        return torch.device("cuda" if cuda else "cpu")
    device = torch.device(given)
    if served is not None and device.type not in served:
        raise ValueError(
            f"init_mesh: device: got {str(device)!r}, but the process group that exists has backends for "
            f"{', '.join(served)} alone ({backends}). Name one in init_process_group, or omit the device."
        )
    return device


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _asks_for_one(axes: int | Mapping[str, int] | None) -> bool:
    """Whether the sizes say that there is one rank, and leave nothing open."""
    return axes == 1 or (isinstance(axes, Mapping) and set(axes.values()) == {1})


def select_device(device: torch.device, job: Job | None) -> None:
    """Make the CUDA device that was asked for, or the launcher's, the current one, as torch does under torchrun."""
    if device.type != "cuda":
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    elif job is not None and job.local_rank is not None and not torch.cuda.is_initialized():
        torch.cuda.set_device(job.local_rank % torch.cuda.device_count())


def job_mesh() -> Mesh:
    """All ranks of the process group as one axis, in the group that is there; one rank where there is none."""
    if not _has_group():
        return Mesh((Axis("job", 1, DetachedBackend()),), torch.device("cpu"))
    device = _with_index(torch.device("cpu" if "cpu:" in dist.get_backend_config() else "cuda"))  # of the group
    group = group_backend(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), device)
    return Mesh((Axis("job", group.size, naming_lost_ranks(group, "job")),), device)


def _simulated_axes(sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    ranks = {name: ContextVar[Tensor | None](name, default=None) for name in sizes}
    others = {name: tuple(var for other, var in ranks.items() if other != name) for name in sizes}
    gathered = ContextVar[Gathered | None]("gathered", default=None)
    return tuple(
        Axis(name, size, StackedBackend(size, ranks[name], gathered, others[name])) for name, size in sizes.items()
    )


def _patience(timeout: timedelta | float | None, several: bool) -> timedelta | None:
    if timeout is None:
        return None
    patience = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if patience <= timedelta():
        raise ValueError(f"init_mesh: timeout: got {timeout}, expected more than 0 seconds")
    if not several or dist.is_initialized():
        state = "exists already: pass its timeout to init_process_group" if several else "is made for one rank: omit it"
        raise ValueError(f"init_mesh: timeout: got {timeout}, but the process group {state}.")
    return patience


def _checked_backend(backend: Backend) -> Backend:
    if not isinstance(backend, Backend):
        raise TypeError(
            f"Mesh.through: wrap returned {type(backend).__name__}, expected a backend: a class that inherits from "
            "functorch_shard.communication.Wrapper or Backend."
        )
    return backend


def _with_index(device: torch.device) -> torch.device:
    """CUDA without a number is the current device, as tensors have it."""
    unnumbered = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if unnumbered else device


def _fill(given: int | Mapping[str, int] | None, num_ranks: int) -> dict[str, int]:
    """The sizes with ``-1`` replaced, checked to multiply to ``num_ranks``."""
    axes = {"shard": given} if isinstance(given, int) else given or {"shard": -1}
    rest = [name for name, size in axes.items() if size == -1]
    known = prod(size for size in axes.values() if size != -1)
    sizes = {name: num_ranks // known if [name] == rest and known > 0 else size for name, size in axes.items()}
    _check_axes("init_mesh", sizes)
    if prod(sizes.values()) != num_ranks:
        raise ValueError(f"init_mesh: {axes_text(axes)} makes {prod(sizes.values())} ranks, but there are {num_ranks}")
    return sizes


def _check_axes(verb: str, sizes: Mapping[str, int]) -> None:
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes.values()):
        raise ValueError(
            f"{verb}: expected at least one axis, each of size 1 or more, got {axes_text(sizes) or 'none'}"
        )
