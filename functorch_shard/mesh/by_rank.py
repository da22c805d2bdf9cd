"""Arguments and results of ranks that run one after the other: tensors are taken apart, and stacked again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, prod
from typing import Any

import optree
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..containers import place, refuse_opaque
from ..errors import reject
from ..torch_internals.tensors import identity_of_storage, version_of
from .axes import coordinate_of
from .rank_dims import LIST, broadcast, has_lists, mapped_call
from .row_memory import at_start_of_memory

_AS_LIST = (
    f"Tensors of one shape are stacked, everything else has to be the same on every rank. out_dims={LIST!r}, for all "
    "results or for one, returns a list with the value of each rank."
)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class RankCall:
    """The arguments of one rank."""

    leaves: Sequence[Any]
    treedef: Any
    sources: Mapping[int, Tensor]  # by leaf: the values of all ranks
    versions: Mapping[int, int]

    def arguments(self) -> Any:
        return optree.tree_unflatten(self.treedef, self.leaves)

    def count_writes(self) -> None:
        """Rows count writes for themselves, so that those of one rank do not count on another."""
        for i, version in self.versions.items():
            if version_of(self.leaves[i]) != version:
                increment_version([self.sources[i]])


def call_of_rank(args: Any, kwargs: Any, in_dims: Any, rank: int, sizes: tuple[int, ...]) -> RankCall:
    if has_lists(in_dims):
        in_dims = (in_dims,) * len(args) if isinstance(in_dims, str) else in_dims
        args, in_dims = _picked(in_dims, args, rank, prod(sizes)), _without_lists(in_dims)
    call = mapped_call(args, kwargs, in_dims, sizes)
    leaves, coordinate = call.leaves, coordinate_of(rank, sizes)
    rows = at_start_of_memory({i: _row(leaves[i], start, coordinate) for i, start in call.starts.items()})
    own = {i: version_of(x) for i, x in rows.items() if not x.requires_grad and not x.is_inference()}
    return RankCall([rows.get(i, x) for i, x in enumerate(leaves)], call.treedef, {i: leaves[i] for i in rows}, own)


def _row(x: Tensor, start: int, coordinate: tuple[int, ...]) -> Tensor:
    """The values of one rank: the same memory, with a count of writes of its own where autograd has no part in it."""
    for i in coordinate:
        x = x.select(start, i)
    return x if x.requires_grad else x.data


def _picked(dims: Any, tree: Any, rank: int, num_ranks: int) -> Any:
    """``tree``, where ``dims`` have a list with the value of each rank, with that of ``rank``."""
    if isinstance(dims, str):
        if not isinstance(tree, (list, tuple)) or len(tree) != num_ranks:
            got = f"{len(tree)} values" if isinstance(tree, (list, tuple)) else f"a {type(tree).__name__}"
            raise ValueError(f"spmd: in_dims={LIST!r}: got {got}, expected a list of {num_ranks} values, one a rank")
        return tree[rank]
    if isinstance(dims, dict):
        return {key: _picked(dims.get(key), x, rank, num_ranks) for key, x in tree.items()}
    if isinstance(dims, (tuple, list)):
        return tuple(_picked(dim, x, rank, num_ranks) for dim, x in zip(dims, tree, strict=True))
    return tree


def _without_lists(dims: Any) -> Any:
    return optree.tree_map(lambda dim: None if isinstance(dim, str) else dim, dims, none_is_leaf=True)


# results


def combined(dims: Any, results: Sequence[Any], calls: Sequence[RankCall], sizes: tuple[int, ...]) -> Any:
    if isinstance(dims, str) and dims == LIST:
        return [optree.tree_map(lambda x: x, result, none_is_leaf=True) for result in results]
    if not has_lists(dims):
        return _stacked(dims, results, calls, sizes)
    kinds = {(type(result), len(result) if isinstance(result, (tuple, list, dict)) else -1) for result in results}
    if len(kinds) > 1 or not isinstance(results[0], (tuple, list, dict)) or len(results[0]) != len(dims):
        raise ValueError(f"spmd: out_dims={dims!r} does not match what the ranks returned")
    if isinstance(dims, dict):
        return {key: combined(dims[key], [result[key] for result in results], calls, sizes) for key in results[0]}
    return tuple(combined(dim, [result[i] for result in results], calls, sizes) for i, dim in enumerate(dims))


def _stacked(dims: Any, results: Sequence[Any], calls: Sequence[RankCall], sizes: tuple[int, ...]) -> Any:
    for result in results:
        refuse_opaque("spmd", result, "the result")
    flat = [optree.tree_flatten(result, none_is_leaf=True) for result in results]
    treedef = flat[0][1]
    differs = [f"rank {rank}: {other}, rank 0: {treedef}" for rank, (_, other) in enumerate(flat) if other != treedef]
    reject("spmd: results have different structures", differs, _AS_LIST)
    of_leaves = list(zip(*(leaves for leaves, _ in flat), strict=True))
    reasons = zip(treedef.paths(), map(_why, of_leaves), strict=True)
    reject("spmd", [f"the result{place(path)}: {why}" for path, why in reasons if why], _AS_LIST)
    of_dims = broadcast(dims, results[0], "out_dims")
    made = [_whole(xs, dim, calls, sizes) for xs, dim in zip(of_leaves, of_dims, strict=True)]
    return optree.tree_unflatten(treedef, made)


def _why(xs: Sequence[Any]) -> str:
    """Why the values of all ranks cannot be returned as one; empty if they can."""
    if isinstance(xs[0], Tensor):
        forms = [(tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else type(x).__name__ for x in xs]
        return "" if len(set(forms)) == 1 else f"differs between ranks: {_each(forms)}"
    plain = any(isinstance(x, _NUMBERS) for x in xs)
    return "" if not plain or all(_alike(x, xs[0]) for x in xs) else f"differs between ranks: {_each(xs)}"


def _each(values: Sequence[Any]) -> str:
    texts = [f"rank {rank}: {value!r}" for rank, value in enumerate(values)]
    return ", ".join(texts[:4] + ["..."] * (len(texts) > 4))


def _alike(x: Any, y: Any) -> bool:
    both_nan = isinstance(x, float) and isinstance(y, float) and isnan(x) and isnan(y)
    return type(x) is type(y) and (x == y or both_nan)


def _whole(xs: Sequence[Any], dim: Any, calls: Sequence[RankCall], sizes: tuple[int, ...]) -> Any:
    if not isinstance(xs[0], Tensor):
        return xs[0]
    if dim is None:
        return _the_same(xs)
    start = dim if dim >= 0 else xs[0].ndim + dim + 1
    if start == 0 and (given := _given(xs, calls)) is not None:
        return given
    rows = torch.stack([*xs]).unflatten(0, sizes)
    return rows.movedim(tuple(range(len(sizes))), tuple(range(start, start + len(sizes))))


def _given(xs: Sequence[Tensor], calls: Sequence[RankCall]) -> Tensor | None:
    """The argument whose rows the ranks returned, for example after they wrote to them (``donate=True``)."""
    places = [i for i, x in enumerate(calls[0].leaves) if i in calls[0].sources and _is_same_memory(x, xs[0])]
    for i in places:
        rows = [call.leaves[i] if i < len(call.leaves) else None for call in calls]
        if all(isinstance(row, Tensor) and _is_same_memory(row, x) for row, x in zip(rows, xs, strict=True)):
            source = calls[0].sources[i]
            if source.shape[len(source.shape) - xs[0].ndim :] == xs[0].shape:
                return source
    return None


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    if type(x) is not Tensor or type(y) is not Tensor or x.requires_grad != y.requires_grad:
        return False
    same_form = (x.shape, x.dtype, x.stride(), x.storage_offset()) == (y.shape, y.dtype, y.stride(), y.storage_offset())
    return same_form and identity_of_storage(x) == identity_of_storage(y)


def _the_same(xs: Sequence[Tensor]) -> Tensor:
    bits = [x.detach() for x in xs]
    if not all(bool(((x == bits[0]) | (x != x) & (bits[0] != bits[0])).all()) for x in bits[1:]):
        raise ValueError(
            "spmd: out_dims=None is for results that are the same on every rank, as psum and all_gather return them; "
            f"a result of shape {tuple(xs[0].shape)} differs. Combine it with a collective, or use out_dims=0."
        )
    return xs[0]
