"""The ranks that hold a tree: those in this process, and those that take part in saving it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree

from ..mesh.init import job_mesh
from ..mesh.mesh import Mesh
from .trees import Full, Sharded


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


def path_text(path: Sequence[Any]) -> str:
    """The path of a leaf in errors, for example ``['optim'][0]``."""
    return "".join(f"[{entry!r}]" for entry in path) or "the tree"
