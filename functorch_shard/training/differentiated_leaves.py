"""Which leaves of an argument are differentiated, and a tree of other values in their places; used by ``grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from ..layout.trees import Full, Sharded
from ..sharding.overlapped_means import Place


@dataclass(frozen=True, eq=False)
class Differentiated:
    """The arguments of one call, and which of them, by position, it is differentiated with respect to.

    ``wanted`` has for each of those which of its leaves have a gradient. Values of all of these leaves stand in one
    list, argument by argument.
    """

    args: Sequence[Any]
    wanted: Mapping[int, Sequence[bool]]

    @staticmethod
    def of(args: Sequence[Any], chosen: Sequence[int]) -> Differentiated:
        return Differentiated(args, {i: wanted_leaves(args[i]) for i in chosen})

    def of_each(self, read: Callable[[Any], Sequence[Any]]) -> list[Any]:
        """What ``read(tree)`` has for the leaves that have a gradient."""
        return [
            value
            for i, wanted in self.wanted.items()
            for value, use in zip(read(self.args[i]), wanted, strict=True)
            if use
        ]

    @property
    def inputs(self) -> list[Tensor]:
        return self.of_each(leaves_of)

    def with_inputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The arguments with ``tensors`` in place of the inputs."""
        call, rest = list(self.args), iter(tensors)
        for i, wanted in self.wanted.items():  # in the order of ``argnums``
            call[i] = _replaced(call[i], wanted, rest)
        return call

    def gradients(self, grads: Sequence[Tensor]) -> dict[int, Any]:
        """Trees of ``grads`` by position, with ``None`` for leaves that have no gradient."""
        rest = iter(grads)
        return {i: _filled(self.args[i], wanted, rest) for i, wanted in self.wanted.items()}


def leaves_of(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, none_is_leaf=True)


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


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _replaced(tree: Any, wanted: Sequence[bool], tensors: Iterator[Any]) -> Any:
    """``tree`` with the next of ``tensors`` in place of each wanted leaf."""
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
    return optree.tree_unflatten(treedef, [next(tensors) if use else x for x, use in zip(leaves, wanted, strict=True)])


def _filled(tree: Any, wanted: Sequence[bool], grads: Iterator[Any]) -> Any:
    """``tree`` with the next of ``grads`` in place of each wanted leaf, and ``None`` in place of the others."""
    treedef = optree.tree_structure(tree, none_is_leaf=True)
    return optree.tree_unflatten(treedef, [next(grads) if use else None for use in wanted])


def is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def places_of(tree: Any) -> list[Place | None]:
    """Of each leaf of a ``Sharded`` its buffer's key and its layout."""
    nodes = optree.tree_leaves(tree, is_leaf=is_sharded, none_is_leaf=True)
    return [place for x in nodes for place in ([(key, x.layout) for key in x] if isinstance(x, Sharded) else [None])]
