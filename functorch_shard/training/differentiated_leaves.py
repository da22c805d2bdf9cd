"""Which leaves of an argument are differentiated, and a tree of other values in their places; used by ``grad``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import optree
from torch import Tensor

from ..layout.trees import Full, Sharded
from ..sharding.overlapped_means import Place


def wanted_leaves(tree: Any) -> list[bool]:
    """Which leaves have a gradient: floating-point tensors that are not frozen in a layout."""
    nodes = optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, (Sharded, Full)), none_is_leaf=True)
    return [flag for node in nodes for flag in _wanted_of(node)]


def _wanted_of(node: Any) -> list[bool]:
    if isinstance(node, Sharded):
        return [node.layout.buffers[key].trainable and _differentiable(x) for key, x in node.items()]
    if isinstance(node, Full):
        buffer_of = {name: node.layout.buffers[key] for name, key in node.layout.key_of.items()}
        return [buffer_of[name].trainable and _differentiable(x) for name, x in node.items()]
    return [_differentiable(node)]


def carried_wider(tree: Any) -> list[bool]:
    """Which leaves have a gradient of a wider dtype than their own until the mean over ranks is taken."""
    nodes = optree.tree_leaves(tree, is_leaf=is_sharded, none_is_leaf=True)
    return [flag for node in nodes for flag in (_wider_than_stored(node) if isinstance(node, Sharded) else [False])]


def _wider_than_stored(node: Sharded) -> list[bool]:
    dtypes = [node.layout.schedule(node.layout.buffers[key]).dtypes for key in node]
    return [each.carried != each.stored for each in dtypes]


def picked(xs: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """Those of ``xs`` that are wanted."""
    return [x for x, use in zip(xs, wanted, strict=True) if use]


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def replaced(tree: Any, wanted: Sequence[bool], tensors: Iterator[Any]) -> Any:
    """``tree`` with the next of ``tensors`` in place of each wanted leaf."""
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
    return optree.tree_unflatten(treedef, [next(tensors) if use else x for x, use in zip(leaves, wanted, strict=True)])


def filled(tree: Any, wanted: Sequence[bool], grads: Iterator[Any]) -> Any:
    """``tree`` with the next of ``grads`` in place of each wanted leaf, and ``None`` in place of the others."""
    treedef = optree.tree_structure(tree, none_is_leaf=True)
    return optree.tree_unflatten(treedef, [next(grads) if use else None for use in wanted])


def is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def places_of(tree: Any) -> list[Place | None]:
    """Of each leaf of a ``Sharded`` its buffer's key and its layout."""
    nodes = optree.tree_leaves(tree, is_leaf=is_sharded, none_is_leaf=True)
    return [place for x in nodes for place in ([(key, x.layout) for key in x] if isinstance(x, Sharded) else [None])]
