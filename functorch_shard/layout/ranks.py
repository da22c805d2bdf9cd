"""Rank arithmetic of a layout: rank dims, row-major order, the shard axis, and which shard a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import optree
from torch import Tensor

from ..mesh.init import job_mesh
from ..mesh.mesh import Axis, Mesh
from .buffers import Buffer
from .layout import Layout
from .trees import is_node


def axis_sizes(layout: Layout) -> tuple[int, ...]:
    """The number of ranks of each axis, in the mesh's order: the leading dims of a stacked tree."""
    return tuple(size for _, size in layout.axes)


def rank_dims(layout: Layout) -> tuple[int, ...]:
    """The leading dims that each leaf has here: one per axis outside ``spmd`` on simulated ranks, otherwise none."""
    return () if layout.mesh.in_spmd else axis_sizes(layout)


def shards_of_ranks(layout: Layout) -> list[int]:
    """The position on the shard axis of every rank; ranks count in row-major order of the axes."""
    names = [name for name, _ in layout.axes]
    coordinates = product(*map(range, axis_sizes(layout)))
    return [shard_at(dict(zip(names, each, strict=True)), layout) for each in coordinates]


def shard_at(coordinate: Mapping[str, Any], layout: Layout) -> Any:
    """The position on the shard axis of a rank, from that on each axis of the mesh: a number, or a tensor of them."""
    shard: Any = 0
    for name in layout.shard_axes:
        shard = shard * layout.axis_size(name) + coordinate.get(name, 0)
    return shard


def shard_axis(layout: Layout) -> Axis:
    """The axis of the mesh that buffers are sharded over."""
    return layout.mesh[layout.shard_axis]


def shard_index(buffer: Buffer, layout: Layout) -> Tensor | int:
    """Which shard of ``buffer`` this rank holds: an int on real ranks, a batched tensor on simulated ones."""
    return shard_axis(layout).backend.index() if buffer.num_shards > 1 else 0


def ranks_by_shard(layout: Layout) -> list[list[int]]:
    """The ranks, in row-major order of the axes, that hold each shard: one, or as many as there are replicas."""
    ranks: list[list[int]] = [[] for _ in range(layout.num_shards)]
    for rank, shard in enumerate(shards_of_ranks(layout)):
        ranks[shard].append(rank)
    return ranks


def ranks_here(mesh: Mesh) -> Sequence[int]:
    """The ranks of ``mesh`` in this process."""
    return range(mesh.size) if mesh.is_simulated else [mesh.rank]


def rows_here(x: Tensor, mesh: Mesh) -> dict[int, Tensor]:
    """The leaf of each rank in this process."""
    places = product(*map(range, mesh.axes.values())) if mesh.is_simulated else [()]
    return {rank: x[place] for rank, place in zip(ranks_here(mesh), places, strict=True)}


def is_number(x: Tensor, layout: Layout) -> bool:
    """Whether ``x`` is one number for its whole buffer, as a step count is, and not a shard."""
    return x.ndim == (len(layout.axes) if layout.mesh.is_simulated else 0)


def participants_of(tree: Any) -> Mesh:
    """The mesh that a tree is sharded over; that of the job for a plain tree, or one with DTensors."""
    layouts = [node.layout for node in optree.tree_leaves(tree, is_leaf=is_node, none_is_leaf=True) if is_node(node)]
    return layouts[0].mesh if layouts and not any(layout.tensor_meshes for layout in layouts) else job_mesh()
