"""Ranks inside this process: rank dims of arguments and results, and batched ranks, which are one vmap an axis.

A collective of batched ranks is arithmetic on the values of all of them: Note [Ranks as a batch axis] in mesh.py.

While simulated ranks run, ``torch.distributed`` has a default process group of their number, which refuses collectives:
a program that asks ``is_initialized()`` would take itself for the only process. On sequential ranks ``get_rank()`` is
the rank; on batched ones it is 0, since torch's own loggers ask for it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from threading import Lock
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import pad

from ..communication.backend import Axis, Backend, Finished, Work
from ..communication.collective import Collective
from ..communication.writes import writes_refused
from ..containers import KNOWN, opaque_problem, opened, place, refuse_opaque
from ..errors import reject
from ..running import RUN, running
from ..torch_internals.autograd import Function, without_batches
from ..torch_internals.tensors import batch_levels, is_number

LIST = "list"  # in place of out_dims: a list with the result of each rank
NESTED = "spmd: this code already runs as one rank of the same mesh; call the undecorated function."
OUTSIDE = (
    "simulated ranks of axis {!r} only exist inside mesh.spmd: decorate the function that communicates with "
    "@mesh.spmd, or wrap it, mesh.spmd(fn)(*args)."
)


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
    def joint(self, names: Sequence[str]) -> Backend:
        """Return the backend of several axes as one, whose ranks count in row-major order of ``names``."""


@dataclass(frozen=True)
class MappedCall:
    """The arguments of a call whose tensors have rank dims."""

    leaves: list[Any]  # of the tree of arguments and keyword arguments
    treedef: Any
    starts: Mapping[int, int]  # by the index of a leaf that has rank dims, the first of them

    def of_rank(self, rows: Iterable[Tensor]) -> Any:
        """Return the arguments and keyword arguments of one rank, whose tensors are ``rows``."""
        leaves = [*self.leaves]
        for i, row in zip(self.starts, rows, strict=True):
            leaves[i] = row
        return self.treedef.unflatten(leaves)


def mapped_call(args: Any, kwargs: Any, in_dims: Any, sizes: tuple[int, ...]) -> MappedCall:
    """Take the arguments apart; raise unless all that have rank dims have a dim for each of ``sizes``."""
    call: Any = opened((args, kwargs))
    leaves, treedef = optree.tree_flatten(call, none_is_leaf=True)
    dims = optree.broadcast_prefix(in_dims, call[0], none_is_leaf=True)
    dims += [0] * (len(leaves) - len(dims))  # of keyword arguments
    starts: dict[int, int] = {}
    opaque, wrong = dict[int, str](), dict[int, str]()
    for i, (x, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None or (isinstance(x, Tensor) and x.ndim == 0 and is_number(x)):
            continue
        if not isinstance(x, Tensor):
            if problem := opaque_problem(x):
                opaque[i] = problem
            continue
        starts[i] = dim if dim >= 0 else x.ndim - len(sizes) + dim + 1
        if tuple(x.shape[starts[i] : starts[i] + len(sizes)]) != sizes:
            where = f"from dim {starts[i]}" if starts[i] else "as leading dims"
            wrong[i] = f"shape {tuple(x.shape)}, expected {sizes} {where}, one a rank"
    if opaque or wrong:
        paths = treedef.paths()
        lines = [
            [("kwargs" if paths[i][0] else "args") + f"{place(paths[i][1:])}: {text}" for i, text in found.items()]
            for found in (opaque, wrong)
        ]
        advice = "What all ranks share, pass by position, with in_dims=None."
        reject("spmd", lines[0], f"{KNOWN} {advice}", TypeError)
        reject("spmd", lines[1], f"Split a global batch with mesh.split. {advice}")
    return MappedCall(leaves, treedef, starts)


def placed(tree: Any, out_dims: Any, num_axes: int, once: Callable[[int, Tensor], Tensor | str]) -> Any:
    """Return ``tree``, whose tensors have leading rank dims, with those where ``out_dims`` says.

    ``once`` gives what the leaf of a number is on every rank, or says how it differs.
    """
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
    dims = optree.broadcast_prefix(out_dims, tree, none_is_leaf=True)
    for i, (x, dim) in enumerate(zip(leaves, dims, strict=True)):
        if isinstance(x, Tensor) and dim is None:
            value = leaves[i] = once(i, x)
            if isinstance(value, str):
                what = f"{tuple(x.shape[num_axes:])} differs: the result{place(treedef.paths()[i])} {value}"
                raise ValueError(
                    "spmd: out_dims=None is for results that are the same on every rank, as psum and all_gather return "
                    f"them; a result of shape {what}. Combine it with a collective, or use out_dims=0."
                )
        elif isinstance(x, Tensor) and dim != 0:
            start = dim if dim > 0 else x.ndim - num_axes + dim + 1
            leaves[i] = x.movedim(tuple(range(num_axes)), tuple(range(start, start + num_axes)))
    return treedef.unflatten(leaves)


def split_tensor(tree: Any, sizes: Mapping[str, int], dims: Mapping[str, int], part: Callable[[Tensor], Tensor]) -> Any:
    """Return ``part`` of every tensor, cut by each axis along its dim, with a new leading dim for each axis."""
    tree = opened(tree)
    refuse_opaque("split", tree, "the tree")
    paths, leaves, treedef = optree.tree_flatten_with_path(tree)
    tensors = [(path, x) for path, x in zip(paths, leaves, strict=True) if isinstance(x, Tensor)]
    if not tensors:
        raise TypeError(f"split: no tensor in a {type(tree).__name__}, and so nothing is split. {KNOWN}")
    by_dim = {dim: prod(sizes[name] for name in dims if dims[name] == dim) for dim in dims.values()}
    problems = [
        f"{place(path) or 'the tensor'}: shape {tuple(x.shape)}, and {number} ranks do not divide dim {dim}"
        for path, x in tensors
        for dim, number in by_dim.items()
        if not -x.ndim <= dim < x.ndim or x.shape[dim] % number
    ]
    reject("split", problems, "Give every rank as many rows: a multiple of the number of ranks.")

    def cut(x: Tensor) -> Tensor:
        ndim = x.ndim
        for lead, (name, size) in enumerate(sizes.items()):
            if name in dims:
                at = dims[name] % ndim + lead
                x = x.unflatten(at, (size, x.shape[at] // size)).movedim(at, lead)  # (.., N * n, ..) -> (N, .., n, ..)
            else:
                x = x.unsqueeze(lead).expand(*x.shape[:lead], size, *x.shape[lead:])
        return x

    return treedef.unflatten([part(cut(x)) if isinstance(x, Tensor) else x for x in leaves])


@dataclass(frozen=True, eq=False)
class Index:
    """The number of the rank that runs, on one axis of ``size`` batched ranks."""

    name: str
    size: int

    def get(self) -> Tensor | None:
        """Return the number, batched over all ranks; ``None`` outside of ``spmd``."""
        return RUN.get().indices.get(self)

    def here(self) -> Tensor:
        """Return the number; raise outside of ``spmd``."""
        if (index := self.get()) is None:
            raise RuntimeError(OUTSIDE.format(self.name))
        return index


def axes_over(x: Tensor) -> tuple[str, ...]:
    """Return the axes of the running ranks over which ``x`` varies, outermost first: Note [Varies] in varying.py."""
    levels = batch_levels(x)
    several = [(axis, index) for axis, index in RUN.get().indices.items() if without_batches(index).numel() > 1]
    return tuple(axis.name for axis, index in several if not levels.isdisjoint(batch_levels(index)))


@dataclass(frozen=True)
class StackedBackend(Backend):
    """Batched ranks of one axis, or of several as one, outermost first; collectives come at the innermost level."""

    size: int
    ranks: tuple[Index, ...] = field(repr=False)
    siblings: tuple[Index, ...] = field(repr=False)
    simulated = True

    @property
    def in_rank(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.ranks[0].get() is not None

    def index(self) -> Tensor:
        index = self.ranks[0].here()
        for each in self.ranks[1:]:
            index = index * each.size + each.here()
        return index

    def place(self) -> tuple[Tensor, Tensor | None]:
        others = [index for each in self.siblings if (index := each.get()) is not None]
        return self.ranks[-1].here(), sum(others[1:], others[0]) if others else None

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        if len(x) == self.size:  # of a joint axis too, of what runs below every level
            return Finished(of_all_ranks(op, x, self.size))
        *outer, inner = self.ranks
        for each in reversed(outer):
            x = _Rows.apply(x, each.here())
        made = of_all_ranks(op, x.flatten(0, len(outer)), self.size)
        if op.law.is_scattered:  # each rank of the outer axes takes what is its own
            made = made.unflatten(0, (*(each.size for each in outer), inner.size))
            for each in outer:
                made = made.index_select(0, each.here().reshape(1)).squeeze(0)
        return Finished(made)


class _Rows(Function):
    """The values of all ranks of an axis in dim 0, with which its level of vmap ends for them."""

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        raise AssertionError("no level of the axis around this")

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor) -> Any:
        if in_dims[1] is not None:
            return x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0), None
        rows = _Rows.apply(x if in_dims[0] is None else x.movedim(in_dims[0], -1), index)  # of an axis between
        return rows, None if in_dims[0] is None else rows.ndim - 1


def of_all_ranks(op: Collective, x: Tensor, size: int) -> Tensor:
    """The result of ``op`` for the values ``x`` of all ranks: one value, or a stack of one for each."""
    made = op.law.of_all_ranks(op, x, size)
    if isinstance(made, Tensor):
        return made
    if len({row.shape for row in made}) == 1:
        return torch.stack(made)
    longest = max(row.shape[-1] for row in made)
    return torch.stack([pad(row, (0, longest - row.shape[-1])) for row in made])


class BatchedRanks(Simulated):
    """The ranks of one mesh, as the batch of a vmap for each axis."""

    kind = "batched"

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._ranks = {name: Index(name, size) for name, size in sizes.items()}
        self.axes = tuple(Axis(name, size, self.joint([name])) for name, size in sizes.items())

    def joint(self, names: Sequence[str]) -> StackedBackend:
        ranks = tuple(self._ranks[name] for name in names)
        ranks = tuple(each for each in ranks if each.size > 1) or ranks[:1]
        siblings = tuple(each for each in self._ranks.values() if each not in ranks)
        return StackedBackend(prod(each.size for each in ranks), ranks, siblings)

    def spmd(
        self, fn: Callable[..., Any], in_dims: Any, out_dims: Any, randomness: str, device: torch.device
    ) -> Callable[..., Any]:
        """``fn`` under one vmap per axis, outermost first; only tensors are mapped."""
        sizes = tuple(axis.size for axis in self.axes)

        @wraps(fn)
        def every_rank(*args: Any, **kwargs: Any) -> Any:
            if any(axis.backend.in_rank for axis in self.axes):
                raise RuntimeError(NESTED)
            watcher = RUN.get().watcher
            if watcher:
                args, kwargs = watcher.given(args, kwargs)
            call, made = mapped_call(args, kwargs, in_dims, sizes), list[Any]()

            def one_rank(*rows: Tensor) -> tuple[Tensor, ...]:
                rank_args, rank_kwargs = call.of_rank(rows)
                result = opened(fn(*rank_args, **rank_kwargs))
                is_of_one_rank = lambda x: isinstance(x, Tensor) and without_batches(x) is not x  # noqa: E731
                refuse_opaque("spmd", result, "the result", matters=is_of_one_rank)
                if watcher:
                    watcher.ran(rank_args, rank_kwargs, result)
                leaves, treedef = optree.tree_flatten(result, none_is_leaf=True)
                asked = [] if isinstance(out_dims, int) else leaves  # an int is not None for any of them
                made[:] = leaves, treedef, [axes_over(x) if isinstance(x, Tensor) else () for x in asked]
                return tuple([leaf for leaf in leaves if isinstance(leaf, Tensor)])

            run: Callable[..., Any] = one_rank
            for ranks in reversed(self._ranks.values()):
                run = _over_axis(run, ranks, [*call.starts.values()], randomness, device)
            with writes_refused(), default_group(prod(sizes)):
                stacked = iter(run(*[call.leaves[i] for i in call.starts]))
            leaves, treedef, over = made
            tree = treedef.unflatten([next(stacked) if isinstance(x, Tensor) else x for x in leaves])

            def once(i: int, x: Tensor) -> Tensor | str:
                return f"varies over {' and '.join(over[i])}" if over[i] else x[(0,) * len(sizes)]

            return placed(tree, out_dims, len(sizes), once)

        return every_rank


def _over_axis(
    fn: Callable[..., Any], ranks: Index, starts: list[int], randomness: str, device: torch.device
) -> Callable[..., Any]:
    def one_rank(index: Tensor, *tensors: Tensor) -> Any:
        with running({ranks: index}):
            return fn(*tensors)

    def all_ranks(*tensors: Tensor) -> Any:
        where = next((x.device for x in tensors if not x.is_cpu), device)  # what is on the CPU may be offloaded
        watched = bool(RUN.get().watcher)
        if watched and where.type == "meta":
            where = torch.device("cpu")  # numbers of ranks stay known until they meet tensors without data
        # for fs.debug.types rows that are one memory are one value, which does not vary
        one = [watched and x.shape[at] > 1 and not x.stride(at) for x, at in zip(tensors, starts, strict=True)]
        dims = [None if same else at for same, at in zip(one, starts, strict=True)]
        rows = [x.select(at, 0) if same else x for x, same, at in zip(tensors, one, starts, strict=True)]
        batched = vmap(one_rank, in_dims=(0, *dims), randomness=randomness)
        return batched(torch.arange(ranks.size, device=where), *rows)

    return all_ranks


# What torch.distributed is inside of simulated ranks.

_GROUP = "simulated"
_ONE_AT_A_TIME = Lock()  # threads of the program may run simulated ranks at once, and share a group


@contextmanager
def default_group(size: int) -> Iterator[None]:
    """A context in which ``torch.distributed`` speaks of ``size`` simulated ranks, unless the process has a group."""
    with _ONE_AT_A_TIME:
        if not dist.is_initialized():
            if _GROUP not in dist.Backend.backend_list:
                make: Any = _Group
                dist.Backend.register_backend(_GROUP, lambda _, rank, size, timeout: make(rank, size), devices=["cpu"])
            hook = sys.excepthook  # init_process_group sets another one
            dist.init_process_group(_GROUP, store=dist.HashStore(), rank=0, world_size=size)
            sys.excepthook = hook
        group = dist.group.WORLD if isinstance(dist.group.WORLD, _Group) else None
        if group is not None:
            group.users += 1
    try:
        yield
    finally:
        with _ONE_AT_A_TIME:
            if group is not None:
                group.users -= 1
                if not group.users:
                    dist.destroy_process_group()


class _Group(dist.ProcessGroup):
    """All simulated ranks. Of collectives torch says "No backend type associated with device type"."""

    users = 0

    def rank(self) -> int:
        return RUN.get().rank or 0
