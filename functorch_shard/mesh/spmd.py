"""One function as every simulated rank: one vmap per axis. See Note [Ranks as a batch axis] in mesh.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor
from torch.func import vmap

from ..communication.axis import Axis
from ..communication.backend import Backend
from ..communication.simulated import StackedBackend, as_ranks
from ..communication.simulated_group import default_group
from ..communication.writes import Gathered
from ..containers import KNOWN, opened, place, refuse_opaque
from ..errors import reject
from ..torch_internals.autograd import without_batches
from .axes import Simulated
from .rank_dims import Dim, broadcast, mapped_call


class BatchedRanks(Simulated):
    """The ranks of one mesh, as the batch of a vmap for each axis."""

    kind = "batched"

    def __init__(self, sizes: Mapping[str, int]) -> None:
        ranks = {name: ContextVar[Tensor | None](name, default=None) for name in sizes}
        self._gathered = ContextVar[Gathered | None]("gathered", default=None)
        self._backends = {
            name: StackedBackend(size, ranks[name], tuple(ranks[other] for other in sizes if other != name))
            for name, size in sizes.items()
        }
        self.axes = tuple(Axis(name, backend.size, backend) for name, backend in self._backends.items())

    def watch(self, key: str, whole: Tensor, names: Sequence[str]) -> None:
        if gathered := self._gathered.get():
            gathered.add(key, whole, names)

    def joint(self, names: Sequence[str]) -> Backend:
        from ..communication.joint import JointStackedBackend

        several = [name for name in names if self._backends[name].size > 1] or [*names]
        parts = tuple(self._backends[name] for name in several)
        siblings = tuple(backend.ranks for name, backend in self._backends.items() if name not in several)
        return parts[0] if len(parts) == 1 else JointStackedBackend(parts, siblings)

    def spmd(
        self, fn: Callable[..., Any], in_dims: Any, out_dims: Any, randomness: str, device: torch.device
    ) -> Callable[..., Any]:
        """``fn`` under one vmap per axis, outermost first; only tensors are mapped."""
        axes = list(self._backends.values())
        sizes = tuple(axis.size for axis in axes)

        @wraps(fn)
        def every_rank(*args: Any, **kwargs: Any) -> Any:
            _refuse_nesting(axes)
            call = mapped_call(args, kwargs, in_dims, sizes)
            leaves, mapped, result = call.leaves, list(call.starts), list[Any]()

            def one_rank(*tensors: Tensor) -> tuple[Tensor, ...]:
                for i, tensor in zip(mapped, tensors, strict=True):
                    leaves[i] = tensor
                rank_args, rank_kwargs = optree.tree_unflatten(call.treedef, leaves)
                result[:] = [opened(fn(*rank_args, **rank_kwargs))]
                refuse_opaque("spmd", result[0], "the result", matters=_of_one_rank)
                return tuple([leaf for leaf in optree.tree_leaves(result[0]) if isinstance(leaf, Tensor)])

            run = _over_ranks(one_rank, axes, [*call.starts.values()], randomness, device)
            with self._writes_refused(), _ways_out(), default_group(prod(sizes)):
                stacked = run(*[leaves[i] for i in mapped])
            return _rebuild(result[0], stacked, out_dims, len(axes))

        return every_rank

    @contextmanager
    def _writes_refused(self) -> Iterator[None]:
        gathered = Gathered()
        token = self._gathered.set(gathered)
        try:
            yield
        finally:
            self._gathered.reset(token)
        gathered.check()


def split_tensor(tree: Any, num_ranks: int, dim: int, part: Callable[[Tensor], Tensor]) -> Any:
    """``part`` of every tensor that was cut into ``num_ranks`` equal parts of ``dim``, stacked in a new dim 0."""
    tree = opened(tree)
    refuse_opaque("split", tree, "the tree")
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    if not any(isinstance(x, Tensor) for x in leaves):
        raise TypeError(f"split: no tensor in {_short(tree)}, and so nothing is split. {KNOWN}")
    problems = [
        f"{place(path) or 'the tensor'}: shape {tuple(x.shape)}, and {num_ranks} ranks do not divide dim {dim}"
        for path, x in zip(paths, leaves, strict=True)
        if isinstance(x, Tensor) and (not -x.ndim <= dim < x.ndim or x.shape[dim] % num_ranks)
    ]
    reject("split", problems, f"Give every rank the same number of rows: a batch of a multiple of {num_ranks}.")
    return optree.tree_map(lambda x: part(_cut(x, num_ranks, dim)) if isinstance(x, Tensor) else x, tree)


def _short(tree: Any) -> str:
    text = repr(tree)
    return f"a {type(tree).__name__}, {text if len(text) < 80 else text[:80] + ' ...'}"


def _cut(x: Tensor, num_ranks: int, dim: int) -> Tensor:
    dim = dim % x.ndim
    return x.unflatten(dim, (num_ranks, x.shape[dim] // num_ranks)).movedim(dim, 0)  # (.., N * n, ..) -> (N, .., n, ..)


_LIMITS = re.compile(r"vmap|functorch|setup_context|saved tensor hooks|SaveInputs|[Bb]atch(ed|ing| norm)|stack expects")
_WAYS_OUT = (
    "Simulated ranks are one torch.func.vmap, which has no rule for this. simulated_mesh(..., kind='sequential') runs "
    "any program; guides/errors.md of the docs has what else to write."
)


@contextmanager
def _ways_out() -> Iterator[None]:
    """Add to errors of vmap, which torch raises, what the caller can do."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        text = str(error)
        if type(error) in (RuntimeError, NotImplementedError) and _LIMITS.search(text) and "simulated" not in text:
            raise RuntimeError(f"spmd: {text}\n{_WAYS_OUT}") from error
        raise


def _over_ranks(
    fn: Callable[..., Any], axes: Sequence[StackedBackend], starts: list[int], randomness: str, device: torch.device
) -> Callable[..., Any]:
    for axis in reversed(axes):
        fn = _over_axis(fn, axis, starts, randomness, device)
    return fn


def _over_axis(
    fn: Callable[..., Any], axis: StackedBackend, starts: list[int], randomness: str, device: torch.device
) -> Callable[..., Any]:
    def one_rank(index: Tensor, *tensors: Tensor) -> Any:
        with as_ranks({axis.ranks: index}):
            return fn(*tensors)

    def all_ranks(*tensors: Tensor) -> Any:
        where = next((x.device for x in tensors if not x.is_cpu), device)  # what is on the CPU may be offloaded
        batched = vmap(one_rank, in_dims=(0, *starts), randomness=randomness)
        return batched(torch.arange(axis.size, device=where), *tensors)

    return all_ranks


def _rebuild(result: Any, stacked: Sequence[Tensor], out_dims: Any, num_axes: int) -> Any:
    """The results of all ranks in the tree that one rank returned, each with its rank dims where ``out_dims`` says."""
    leaves, treedef = optree.tree_flatten(result, none_is_leaf=True)
    dims = broadcast(out_dims, result, "out_dims")
    values = iter(stacked)
    made = [next(values) if isinstance(x, Tensor) else x for x in leaves]
    moved = [
        _place(x, dim, num_axes) if dim != 0 and isinstance(x, Tensor) else x for x, dim in zip(made, dims, strict=True)
    ]
    return optree.tree_unflatten(treedef, moved)


def _place(x: Tensor, dim: Dim, num_axes: int) -> Tensor:
    if dim is None:
        return _the_same_on_all_ranks(x, num_axes)
    start = dim if dim >= 0 else x.ndim - num_axes + dim + 1
    return x.movedim(tuple(range(num_axes)), tuple(range(start, start + num_axes)))


def _the_same_on_all_ranks(x: Tensor, num_axes: int) -> Tensor:
    # vmap returns a value without a batch dim as an expanded view: stride 0 over the ranks.
    if any(x.shape[i] > 1 and x.stride(i) for i in range(num_axes)):
        raise ValueError(
            "spmd: out_dims=None is for results that are the same on every rank, as psum and all_gather return them; "
            f"a result of shape {tuple(x.shape[num_axes:])} differs. Combine it with a collective, or use out_dims=0."
        )
    return x[(0,) * num_axes]


def _refuse_nesting(axes: Sequence[StackedBackend]) -> None:
    if any(axis.ranks.get() is not None for axis in axes):
        raise RuntimeError("spmd: this code already runs as one rank of the same mesh; call the undecorated function.")


def _of_one_rank(x: Any) -> bool:
    """Whether ``x`` belongs to the ranks, and means nothing outside."""
    return isinstance(x, Tensor) and without_batches(x) is not x
