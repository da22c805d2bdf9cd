"""A function of one rank, run as every simulated rank: the rank dims of its arguments and results, and one vmap a axis.

See Note [Ranks as a batch axis] in mesh.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor
from torch.func import vmap

from ..communication.backend import Axis, Backend
from ..communication.simulated import Index, StackedBackend, axes_over, default_group, running, writes_refused
from ..containers import KNOWN, opaque_problem, opened, place, refuse_opaque
from ..errors import reject
from ..torch_internals.autograd import WATCHER, without_batches
from ..torch_internals.tensors import is_number

LIST = "list"  # in place of out_dims: a list with the result of each rank


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
            watcher = WATCHER.get()
            if watcher:
                args, kwargs = watcher.given(args, kwargs)
            call, made = mapped_call(args, kwargs, in_dims, sizes), list[Any]()

            def one_rank(*rows: Tensor) -> tuple[Tensor, ...]:
                rank_args, rank_kwargs = call.of_rank(rows)
                result = opened(fn(*rank_args, **rank_kwargs))
                refuse_opaque("spmd", result, "the result", matters=_is_of_one_rank)
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
        if WATCHER.get() and where.type == "meta":
            where = torch.device("cpu")  # numbers of ranks stay known until they meet tensors without data
        # for fs.debug.types rows that are one memory are one value, which does not vary
        one = [WATCHER.get() and x.shape[at] > 1 and not x.stride(at) for x, at in zip(tensors, starts, strict=True)]
        dims = [None if same else at for same, at in zip(one, starts, strict=True)]
        rows = [x.select(at, 0) if same else x for x, same, at in zip(tensors, one, starts, strict=True)]
        batched = vmap(one_rank, in_dims=(0, *dims), randomness=randomness)
        return batched(torch.arange(ranks.size, device=where), *rows)

    return all_ranks


def _is_of_one_rank(x: Any) -> bool:
    """Return whether ``x`` belongs to the ranks, and means nothing outside."""
    return isinstance(x, Tensor) and without_batches(x) is not x


NESTED = "spmd: this code already runs as one rank of the same mesh; call the undecorated function."

# Rank dims, of ranks of every kind.


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
    made: list[Any] = []
    dims = optree.broadcast_prefix(out_dims, tree, none_is_leaf=True)
    for i, (x, dim) in enumerate(zip(leaves, dims, strict=True)):
        value = x
        if isinstance(x, Tensor) and dim is None:
            value = once(i, x)
            if isinstance(value, str):
                what = f"{tuple(x.shape[num_axes:])} differs: the result{place(treedef.paths()[i])} {value}"
                raise ValueError(
                    "spmd: out_dims=None is for results that are the same on every rank, as psum and all_gather return "
                    f"them; a result of shape {what}. Combine it with a collective, or use out_dims=0."
                )
        elif isinstance(x, Tensor) and dim != 0:
            start = dim if dim > 0 else x.ndim - num_axes + dim + 1
            value = x.movedim(tuple(range(num_axes)), tuple(range(start, start + num_axes)))
        made.append(value)
    return treedef.unflatten(made)


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
