"""Trees of ``Sharded`` nodes by rank: of one rank, stacked, or a list of the trees of all ranks.

Note [Leaves of a buffer]: for a buffer a node holds a *shard*, one *number* for the whole buffer (as a step count),
``None``, or nothing at all (an optimizer's state has no leaves for frozen buffers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import optree
from torch import Tensor

from ..errors import reject
from ..mesh.init import job_mesh
from ..mesh.mesh import Mesh
from .layout import Layout
from .trees import Full, Sharded

NOTHING = object()


@dataclass(frozen=True)
class Holding:
    """The nodes of a tree, for each rank in this process."""

    layout: Layout
    paths: Sequence[str]
    ranks: Mapping[int, Sequence[Mapping[str, Any]]]  # rank -> node by node: buffer key -> the leaf of that rank
    rebuild: Callable[[Iterator[Any]], Any]  # the tree with other nodes

    def example(self, node: int, key: str) -> Any:
        """The leaf of one of the ranks."""
        return next(iter(self.ranks.values()))[node].get(key, NOTHING)

    def kinds(self, node: int, key: str) -> list[str]:
        """The kinds of the leaf on the ranks; one, if they are alike."""
        return sorted({_kind(nodes[node].get(key, NOTHING)) for nodes in self.ranks.values()})

    def lines(self) -> Iterator[str]:
        """Lines that have to be equal on all ranks."""
        yield from self.layout.lines()
        for node, path in enumerate(self.paths):
            for key in self.layout.buffers:
                yield f"{path}: {key!r}: {', '.join(self.kinds(node, key))}"


def ranks_here(mesh: Mesh) -> Sequence[int]:
    """The ranks of ``mesh`` in this process."""
    return range(mesh.size) if mesh.is_simulated else [mesh.rank]


def mesh_of(tree: Any) -> Mesh:
    """The mesh that a tree is sharded over; for a plain tree, that of the job."""
    nodes = (x for x in optree.tree_leaves(tree, is_leaf=is_node, none_is_leaf=True) if is_node(x))
    node = next(nodes, None)
    return job_mesh() if node is None else node.layout.mesh


def participants_of(tree: Any) -> Mesh:
    """The ranks that take part in saving a tree: those of its mesh, or of the job if it has DTensors."""
    layouts = [node.layout for node in optree.tree_leaves(tree, is_leaf=is_node, none_is_leaf=True) if is_node(node)]
    return job_mesh() if any(layout.tensor_meshes for layout in layouts) else mesh_of(tree)


def is_node(x: Any) -> bool:
    return isinstance(x, (Sharded, Full))


def holding(what: str, tree: Any) -> Holding:
    """Split ``tree`` into nodes: at least one, all of one layout, with leaves that fit it."""
    trees = tree if isinstance(tree, list) else [tree]
    flat = [optree.tree_flatten(one, is_leaf=is_node, none_is_leaf=True) for one in trees]
    nodes = [[leaf for leaf in leaves if isinstance(leaf, Sharded)] for leaves, _ in flat]
    whole = any(isinstance(leaf, Full) for leaves, _ in flat for leaf in leaves)
    if whole or not nodes or not all(nodes):
        got = "a Full" if whole else "no Sharded" if nodes else "an empty list"
        raise TypeError(
            f"{what}: got {got}, expected a pytree with Sharded nodes; shard(full, layout) slices whole parameters."
        )
    leaves, treedef = flat[0]
    paths = [path_text(path) for path, x in zip(treedef.paths(), leaves, strict=True) if isinstance(x, Sharded)]
    layout = nodes[0][0].layout
    problems = _list_problems(nodes, [treedef for _, treedef in flat]) if isinstance(tree, list) else []
    problems += [
        f"{path}: of another layout than {paths[0]}"
        for path, x in zip(paths, nodes[0], strict=True)
        if x.layout != layout
    ]
    advice = "A list holds the trees of all ranks, in rank order; several trees of one rank go into a tuple or a dict."
    reject(what, problems, advice)
    dims = tuple(layout.mesh.axes.values()) if layout.mesh.is_simulated else ()
    every = [(path, x) for of_rank in nodes for path, x in zip(paths, of_rank, strict=True)]
    problems = [problem for path, x in every for problem in _leaf_problems(path, x, layout, dims)]
    reject(what, problems, "A leaf is a shard, a number for its whole buffer, or None.")

    def rebuild(made: Iterator[Any]) -> Any:
        return optree.tree_unflatten(treedef, [next(made) if isinstance(x, Sharded) else x for x in leaves])

    return Holding(layout, paths, _by_rank(nodes, layout.mesh, isinstance(tree, list)), rebuild)


def _by_rank(nodes: Sequence[Sequence[Sharded]], mesh: Mesh, of_all: bool) -> Mapping[int, Sequence[Mapping[str, Any]]]:
    if of_all:
        return dict(enumerate(nodes))
    if not mesh.is_simulated:
        return {mesh.rank: nodes[0]}
    places = enumerate(product(*(range(size) for size in mesh.axes.values())))
    return {rank: [_row(node, place) for node in nodes[0]] for rank, place in places}


def _row(node: Sharded, place: tuple[int, ...]) -> Mapping[str, Any]:
    """The leaves of one rank in a stacked node."""
    return {key: x[place] if isinstance(x, Tensor) else x for key, x in node.items()}


def _kind(leaf: Any) -> str:
    """The kind of a leaf; that of a number contains its value."""
    if leaf is NOTHING:
        return "nothing"
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return f"a shard of {leaf.dtype}" if leaf.ndim else f"{leaf.item()!r} ({leaf.dtype})"


def path_text(path: Sequence[Any]) -> str:
    """The path of a leaf in errors, for example ``['optim'][0]``."""
    return "".join(f"[{entry!r}]" for entry in path) or "the tree"


def _list_problems(nodes: Sequence[Sequence[Sharded]], treedefs: Sequence[Any]) -> list[str]:
    layout = nodes[0][0].layout
    if layout.mesh.is_simulated:
        return ["got a list of stacked trees, each of which has all ranks already"]
    problems = [f"got {len(nodes)} trees, expected {layout.mesh.size}, one a rank"] * (len(nodes) != layout.mesh.size)
    for i, of_rank in enumerate(nodes):
        rank = of_rank[0].layout.mesh.rank
        problems += [f"tree {i} of the list is that of rank {rank}"] * (rank != i)
        problems += [f"tree {i} of the list has another structure than tree 0"] * (treedefs[i] != treedefs[0])
        problems += [f"tree {i} of the list has another layout than tree 0"] * (of_rank[0].layout != layout)
    return problems


def _leaf_problems(path: str, node: Sharded, layout: Layout, dims: tuple[int, ...]) -> list[str]:
    problems = [f"{path}: {key!r}: the layout has no such buffer" for key in node if key not in layout.buffers]
    for key, x in node.items():
        if key in layout.buffers and isinstance(x, Tensor):
            shape = (*dims, layout.buffers[key].shard_numel)
            if tuple(x.shape) not in (shape, dims):
                problems.append(
                    f"{path}: {key!r}: got shape {tuple(x.shape)}, expected {shape}, or {dims} for a number"
                )
    return problems
