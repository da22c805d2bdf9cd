"""The rank dims of arguments and results of ``spmd``: where they are, and whether they are right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from ..containers import KNOWN, opaque_problem, opened, place
from ..errors import reject
from ..torch_internals.autograd import is_number

Dim = Any  # an int, or None
LIST = "list"  # in place of out_dims: a list with the result of each rank


@dataclass(frozen=True)
class MappedCall:
    """The arguments of a call whose tensors have rank dims.

    Args:
        leaves: of the tree of arguments and keyword arguments.
        treedef: the structure of that tree.
        starts: by the index of a leaf that has rank dims, the first of them.
    """

    leaves: list[Any]
    treedef: Any
    starts: Mapping[int, int]


def mapped_call(args: Any, kwargs: Any, in_dims: Any, sizes: tuple[int, ...]) -> MappedCall:
    """Take the arguments apart; raise unless all that have rank dims have a dim for each of ``sizes``."""
    call: Any = opened((args, kwargs))
    leaves, treedef = optree.tree_flatten(call, none_is_leaf=True)
    dims = _dims_of_call(in_dims, call)
    starts: dict[int, int] = {}  # by the index of a leaf with rank dims
    for i, (x, dim) in enumerate(zip(leaves, dims, strict=True)):
        if isinstance(x, Tensor) and dim is not None and not (x.ndim == 0 and is_number(x)):
            starts[i] = dim if dim >= 0 else x.ndim - len(sizes) + dim + 1
    _check_leaves(treedef, leaves, dims)
    _check_sizes(treedef, leaves, starts, sizes)
    return MappedCall(leaves, treedef, starts)


def _dims_of_call(in_dims: Any, call: tuple[Any, Any]) -> list[Dim]:
    """One dim for each leaf of the arguments ``call``, which are opened; keyword arguments have theirs at 0."""
    keywords = optree.tree_structure(call[1], none_is_leaf=True).num_leaves
    return broadcast(in_dims, call[0], "in_dims") + [0] * keywords


def broadcast(dims: Any, tree: Any, what: str) -> list[Dim]:
    """One dim per leaf of ``tree``, from a tree that is a prefix of it."""
    if any(isinstance(dim, str) for dim in optree.tree_leaves(dims)):
        raise ValueError(
            f"spmd: {what}={dims!r}: expected dims. {LIST!r} is for out_dims of ranks that run one after the other, "
            "simulated_mesh(..., kind='sequential'); an argument of each rank's own is args[mesh.rank] there."
        )
    try:
        return optree.broadcast_prefix(opened(dims, always=True), tree, none_is_leaf=True)
    except (ValueError, TypeError) as error:
        raise ValueError(f"spmd: {what}={dims} does not match the tree it is for: {error}") from None


def _check_leaves(treedef: Any, leaves: list[Any], dims: list[Dim]) -> None:
    """Refuse what holds tensors that cannot be mapped, unless all ranks are to share it."""
    others = [i for i, x in enumerate(leaves) if not isinstance(x, Tensor) and dims[i] is not None]
    paths = treedef.paths() if others else []
    found = [(paths[i], opaque_problem(leaves[i])) for i in others]
    problems = [f"{_path(path)}: {problem}" for path, problem in found if problem]
    reject("spmd", problems, f"{KNOWN} What all ranks share, pass by position, with in_dims=None.", TypeError)


def _check_sizes(treedef: Any, leaves: list[Any], starts: Mapping[int, int], sizes: tuple[int, ...]) -> None:
    shapes = [(i, start, tuple(leaves[i].shape)) for i, start in starts.items()]
    wrong = [(i, start, shape) for i, start, shape in shapes if shape[start : start + len(sizes)] != sizes]
    paths, problems = treedef.paths() if wrong else [], []
    for i, start, shape in wrong:
        where = f"from dim {start}" if start else "as leading dims"
        problems.append(f"{_path(paths[i])}: shape {shape}, expected {sizes} {where}, one a rank")
    reject(
        "spmd",
        problems,
        "Split a global batch with mesh.split; pass what all ranks share by position, with in_dims=None.",
    )


def _path(path: tuple[Any, ...]) -> str:
    """The place of an argument as a reader would write it: ``args[0]['x']``."""
    return ("kwargs" if path[0] else "args") + place(path[1:])
