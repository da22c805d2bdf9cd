"""The ranks: real ones over a process group, or simulated ones: a batch dim, or threads of which one runs at a time.

Note [Ranks as a batch axis]: on a simulated mesh of kind ``"batched"``, ``spmd`` is ``torch.func.vmap`` over the ranks,
one level per axis, and the vmap rule of a collective *is* the communication. Each level carries the rank index as a
tensor batched at that level alone; a collective takes it as an operand, and so distinguishes the level of its axis from
the user's own vmaps. JAX's ``vmap(axis_name=...)`` is the same idea.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, overload

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..communication.backend import Axis, Backend
from ..containers import Static, opened
from ..errors import axes_text
from ..torch_internals.autograd import eager
from ..torch_internals.tensors import whole_mesh
from .agreement import agree
from .axes import Wrapper, backend_of, check_axes, group_axis, joint_backend, with_index, wrapped

if TYPE_CHECKING:
    from .simulated import Simulated

Fn = TypeVar("Fn", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Mesh(Static):
    """The ranks of a program, in one or more named axes.

    Made by :func:`init_mesh`, :func:`simulated_mesh` or :meth:`from_device_mesh`; an immutable
    handle. Ranks count in row-major order of the axes. Copying keeps the handle; pickling keeps names and sizes, and
    real ranks stay behind.
    """

    _axes: tuple[Axis, ...]
    device: torch.device
    processes: tuple[int, ...] = ()  # numbers in the default group, in rank order; none: simulated or unpickled
    device_mesh: DeviceMesh | None = None  # what it was made from
    _wraps: tuple[Wrapper, ...] = ()  # of with_backend, for axes that are joined later
    _joint: dict[Any, Axis] = field(default_factory=dict)  # by names and wraps; shared with other handles
    _simulated: Simulated | None = None

    @property
    def axes(self) -> dict[str, int]:
        """The size of each axis, by name, outermost first."""
        return {axis.name: axis.size for axis in self._axes}

    @property
    def size(self) -> int:
        """The number of ranks: the product of the axes."""
        return prod(self.axes.values())

    @cached_property
    def kind(self) -> str | None:
        """Simulated ranks: ``"batched"`` or ``"sequential"``. Real ones: torch's backend, such as ``"gloo"``.

        ``None``: one rank without a process group.
        """
        group = self.device_mesh and self.device_mesh.get_group(0)
        return self._simulated.kind if self._simulated else group and backend_of(group, self.device)

    @cached_property
    def _backend(self) -> Backend:
        return self._axes[0].backend  # all of them know where code runs

    # Read a dozen times in a step, so without a call of Python.
    is_simulated = property(
        attrgetter("_backend.simulated"),
        doc="""Whether code here has the values of all ranks, in rank dims: on simulated ranks.

        Inside ``spmd`` of ranks that run one after the other it is false: there code has the values of one rank.
        """,
    )
    in_spmd = property(
        attrgetter("_backend.in_rank"),
        doc="Whether code here runs as one of the ranks: always on real ranks, inside ``spmd`` on simulated ones.",
    )

    def __getitem__(self, name: str | tuple[str, ...]) -> Axis:
        """The axis of this name; of several, ``mesh["dp", "cp"]``, in the mesh's order, their ranks as one.

        On real ranks the first use of joint axes makes a process group, so all of its ranks have to come there.
        """
        name = ",".join(name) if isinstance(name, tuple) else name
        for axis in self._axes:
            if axis.name == name:
                return axis
        names = name.split(",")
        if len(names) < 2 or names != [axis for axis in self.axes if axis in names]:
            raise KeyError(f"{name!r}: the mesh has the axes {axes_text(self.axes)}")
        return self._joined(name, names, self._wraps)

    def _joined(self, name: str, names: Sequence[str], wraps: tuple[Wrapper, ...]) -> Axis:
        """Return the axes ``names`` as one, behind what each of ``wraps`` puts before them."""
        if (name, wraps) not in self._joint:
            if wraps:
                made = wrapped(self._joined(name, names, wraps[:-1]), wraps[-1])
            else:
                simulated, size = self._simulated, prod(self.axes[each] for each in names)
                backend = simulated.joint(names) if simulated else None
                made = Axis(name, size, backend or joint_backend(self._axes, names, self.processes, self.device))
            self._joint[name, wraps] = made
        return self._joint[name, wraps]

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

        On real ranks every process is already one of them: ``spmd(fn)`` is ``fn`` itself. On batched simulated ranks it
        is ``fn`` under one vmap per axis: tensors are mapped, everything else is passed through. On sequential ones it
        is ``fn`` once for each rank, in threads of which one runs at a time, with copies of its tensors. Numbers that
        ranks return there have to be the same. Python objects are shared, except for torch's random numbers.

        Args:
            fn: what each rank does; per-rank tensors in, per-rank tensors out. Without it, a decorator.
            in_dims: where the rank dims of each positional argument start, as in ``torch.func.vmap``: an int, or a
                tuple of trees. ``None``: the same on every rank, no rank dims. Keyword arguments are mapped at 0.
            out_dims: where the rank dims of each result go. ``None``: the same on every rank, returned once. Batched
                ranks decide by what a value varies over (``fs.debug.varies``), sequential ones compare values.
                ``"list"``, on sequential ranks: a list with what each rank returned.
            randomness: as in vmap: ``"different"`` random numbers on every simulated rank, or ``"same"``. Sequential
                ranks have a generator each, which starts where this one is (``"same"``), or at a seed made of that and
                the rank. A real rank draws from its own generator, whatever this says: ``torch.manual_seed``.

        Returns:
            A function whose tensors carry one rank dim per axis, in the mesh's order.

        Arguments and results may be any pytrees, also dataclasses, ``UserDict`` and what torch's pytree knows.

        Differentiate inside: a transform around ``spmd`` sees all ranks at once. There ``fs.grad`` is the derivative of
        what is returned, and under ``torch.func``'s own transforms the reduction of ``gather`` still applies, so the
        gradient of a sum over ranks is the gradient of the mean.

        Raises:
            ValueError: a tensor has no rank dims of the right sizes, or a result for ``out_dims=None`` varies.
            TypeError: an argument, or the result, has tensors inside of an object that is not such a container.
                Modules, functions and optimizers are passed through.
            RuntimeError: called inside ``spmd`` of the same mesh. Or what a vmap cannot do, by torch's own error.
                Sequential ranks: they wait for each other, or issue different collectives; the message has the lines.
            NotImplementedError: a transform or a compiler is around the function, on sequential ranks.
            Exception: what a rank raised, on sequential ones with a note of its number.

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
        if self._simulated is None:
            return fn
        return eager(self._simulated.spmd(fn, in_dims, out_dims, randomness, self.device))

    def split(self, tree: Any, dim: int | Mapping[str, int] = 0) -> Any:
        """This rank's part of a global batch: rank r of N gets the r-th of N equal parts of ``dim``.

        Args:
            tree: a tensor or a pytree; its tensors are split, everything else is passed through.
            dim: the dimension to split, divisible by ``mesh.size``. Or one for each axis by name, as
                ``{"shard": 0, "context": 1}``: a dimension that several axes split is divisible by their product, and
                ranks of an axis that is left out get the same.

        Returns:
            Real ranks: views with ``dim`` divided by ``mesh.size``. Simulated ranks: the parts of all ranks, with one
            leading rank dim per axis, as ``spmd`` takes them; inside ``spmd`` a copy of this rank's part.

        Raises:
            KeyError: the mesh has no such axis.
            ValueError: a tensor whose ``dim`` is not divisible; the message names all of them.
            TypeError: no tensor in the tree, or tensors or arrays where no tree can reach them, named by type and path.

        Example:
            >>> fs.simulated_mesh(2).split(torch.arange(6))
            tensor([[0, 1, 2],
                    [3, 4, 5]])
        """
        from .simulated import split_tensor

        dims = dict(dim) if isinstance(dim, Mapping) else dict.fromkeys(self.axes, dim)
        return split_tensor(tree, self.axes, dims, self._part)

    def batches(self, of_rank: Callable[[int], Iterable[Any]]) -> Iterator[Any]:
        """Yield the batches of each rank's own loader as ``spmd`` takes them, on ``mesh.device``.

        Rank r gets those of ``of_rank(r)``. Outside ``spmd`` those of all simulated ranks are stacked, a dim per axis.

        Args:
            of_rank: from a rank to what it iterates over, trees of tensors, such as a ``DataLoader``.

        Raises:
            ValueError: simulated ranks have other numbers of batches.
            RuntimeError: their batches have other shapes. Pad them, with labels that the loss ignores.

        Example:
            >>> mesh = fs.simulated_mesh(2)
            >>> [x.tolist() for x in mesh.batches(lambda rank: torch.arange(6)[rank::2].split(2))]
            [[[0, 2], [1, 3]], [[4], [5]]]
        """
        dims = tuple(self.axes.values()) if self.is_simulated else ()
        put = lambda *xs: (self._part(torch.stack(xs).unflatten(0, dims)) if dims else xs[0]).to(self.device)  # noqa: E731
        for trees in zip(*map(of_rank, range(self.size) if dims else [self.rank]), strict=True):
            yield optree.tree_map(put, *map(opened, trees))

    def _part(self, rows: Tensor) -> Tensor:
        """Of values of all ranks, in a dim for each axis: those that code here sees."""
        if not self.is_simulated:
            return rows[self.coordinate]
        if self.in_spmd:
            indices: list[Any] = [axis.backend.index() for axis in self._axes]
            for index in indices:
                rows = rows.index_select(0, index.reshape(1)).squeeze(0)  # a batched index cannot subscript
        return rows

    @property
    def rank(self) -> int:
        """This process's rank on a real mesh, in row-major order of the axes; 0 outside ``spmd`` of a simulated one.

        Raises:
            RuntimeError: inside ``spmd`` on batched ranks, as :attr:`coordinate`.
        """
        rank = 0
        for axis, index in zip(self._axes, self.coordinate, strict=True):
            rank = rank * axis.size + index
        return rank

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This process's position on each axis of a real mesh; zeros outside ``spmd`` of a simulated one.

        Raises:
            RuntimeError: inside ``spmd`` on batched ranks, where one run is every rank, and none has a number that
                Python could see. ``fs.collectives.axis_index(mesh)`` is the rank as a tensor, on real ranks too.
        """
        if self.is_simulated and self.in_spmd:
            raise RuntimeError(
                "mesh.rank and mesh.coordinate: inside spmd on simulated ranks this line runs once for all of them, so "
                "no number is right for each. fs.collectives.axis_index(mesh) is the rank as a tensor, on real ranks "
                "too; what one rank alone does, as printing, do outside of spmd, where mesh.rank is 0."
            )
        return tuple(0 if axis.backend.simulated else int(axis.backend.index()) for axis in self._axes)

    def with_backend(self, wrap: Wrapper) -> Mesh:
        """A handle of the same ranks whose collectives go another way: to count, check, replace or skip them.

        Everything that is planned on it, or put on it by ``layout.on``, communicates that way; this handle stays as it
        is. Pickles keep neither ranks nor backends.

        Args:
            wrap: ``fs.communication.wrap(function)``, ``skip(kind)`` or a ``Counter``; or a function from an axis to
                what one of them makes of it, to the axis itself, or to a ``Backend`` of your own.

        Returns:
            A mesh of the same axes. Wrapped again, the last wrap is asked first. All ranks have to wrap alike.

        Raises:
            ValueError: a backend of your own for an axis that is wrapped already: nothing would go through the wrap.

        Example:
            >>> counter = fs.communication.Counter()
            >>> mesh = fs.simulated_mesh({"replicate": 2, "shard": 2}).with_backend(counter)
            >>> _ = mesh.spmd(lambda x: fs.collectives.psum(x, mesh))(torch.ones(2, 2, 3))
            >>> [(axis, kind, seen.number, seen.nbytes) for (axis, kind), seen in counter.traffic.items()]
            [('replicate', 'psum', 1, 12), ('shard', 'psum', 1, 12)]
        """
        axes = tuple(wrapped(axis, wrap) for axis in self._axes)
        simulated = self._simulated
        if simulated and not any(axis.backend is here.backend for axis in axes for here in simulated.axes):
            simulated = None
        return replace(self, _axes=axes, _wraps=(*self._wraps, wrap), _simulated=simulated)

    def agree(self, verb: str, build: Callable[[], T], describe: Callable[[T], Sequence[str]], *advice: str) -> T:
        """``build()``, made sure to be the same on every rank; see ``agreement.agree``."""
        real = [axis for axis in self._axes if axis.size > 1 and not axis.backend.simulated]
        return agree(verb, build, describe, real, self.device, *advice) if real else build()

    @staticmethod
    def from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
        """The ranks of a torch ``DeviceMesh``; its dims need names.

        Of a device mesh with a tensor axis, take the slice of the data axes, ``device_mesh["shard"]``: parameters may
        be DTensors over the other axes.

        Raises:
            ValueError: the device mesh has no ``mesh_dim_names``.
            NotImplementedError: its ranks are not ascending along an axis, as a process group counts them.
        """
        names, coordinate = device_mesh.mesh_dim_names, device_mesh.get_coordinate()
        if names is None or coordinate is None:
            raise ValueError(
                "Mesh.from_device_mesh: expected a device mesh with mesh_dim_names that contains this rank, got "
                f"{device_mesh}. Pass mesh_dim_names=('shard',) or ('replicate', 'shard') to init_device_mesh."
            )
        ranks = device_mesh.mesh
        if any((ranks.diff(dim=dim) < 0).any() for dim in range(ranks.ndim)):  # a process group counts in this order
            raise NotImplementedError(f"Mesh.from_device_mesh: ranks {ranks.tolist()}: expected ascending on each axis")
        sizes, device = device_mesh.shape, with_index(torch.device(device_mesh.device_type))
        places = zip(names, coordinate, sizes, strict=True)
        axes = [group_axis(name, device_mesh.get_group(name), rank, size, device) for name, rank, size in places]
        return Mesh(tuple(axes), device, tuple(device_mesh.mesh.flatten().tolist()), device_mesh)

    def sibling(self, *names: str) -> Mesh:
        """The ranks along other axes of the device mesh that this one is a slice of: ``mesh.sibling("tensor")``.

        Raises:
            KeyError: the mesh is not a slice of a device mesh with these axes.
        """
        whole = None if self.device_mesh is None else whole_mesh(self.device_mesh)
        if whole is None or not set(names) <= set(whole.mesh_dim_names or ()):
            raise KeyError(
                f"{self} has no axes {', '.join(map(repr, names))} beside it. Make it from a slice of the device mesh "
                "that has all axes, for example Mesh.from_device_mesh(device_mesh['shard'])."
            )
        return Mesh.from_device_mesh(whole[names])

    __copy__ = __deepcopy__ = lambda self, _=None: self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._simulated is not None:
            return partial(simulated_mesh, self.axes, device=self.device, kind=self._simulated.kind), ()
        return Mesh, (self._axes, self.device)

    def __repr__(self) -> str:
        kind = ""
        if self._simulated is not None:
            kind = {"batched": "simulated, "}.get(self._simulated.kind, "simulated one after the other, ")
        return f"Mesh({axes_text(self.axes)}, {kind}{self.device})"


def simulated_mesh(
    axes: int | Mapping[str, int], *, device: torch.device | str | None = None, kind: str = "batched"
) -> Mesh:
    """Ranks inside this process: the same program, no process group, true values, every transform.

    Args:
        axes: the number of ranks of one axis ``"shard"``, or sizes by name, outermost first.
        device: where ``shard`` puts values; torch's default device unless given.
        kind: how ``spmd`` runs a function. ``"batched"``: once, under a vmap over the ranks, which is fast, and
            refuses what a vmap cannot do. ``"sequential"``: once for each rank, one after the other, with the numbers
            of real ranks: that runs too. Ranks are threads: they share modules, torch's settings, other objects.
            ``bind(model, params)`` is a module of one rank; a collective inside of ``functional_call`` is refused.

    Raises:
        ValueError: a size below 1, or no axis, or no such kind.

    Example:
        >>> fs.simulated_mesh({"replicate": 2, "shard": 4}).size
        8
        >>> mesh = fs.simulated_mesh(2, kind="sequential")
        >>> mesh.spmd(lambda x: x * 10 if x.item() > 1 else x)(torch.tensor([1, 2]))   # row r = rank r
        tensor([ 1, 20])
    """
    sizes = {"shard": axes} if isinstance(axes, int) else dict(axes)
    check_axes("simulated_mesh", sizes)
    where = torch.get_default_device() if device is None else torch.device(device)
    if kind == "sequential":
        from ..sequential.ranks import SequentialRanks

        ranks: Simulated = SequentialRanks(sizes)
    elif kind == "batched":
        from .simulated import BatchedRanks

        ranks = BatchedRanks(sizes)
    else:
        raise ValueError(f"simulated_mesh: kind: got {kind!r}, expected 'batched' or 'sequential'")
    return Mesh(ranks.axes, where, _simulated=ranks)
