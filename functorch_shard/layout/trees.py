"""``Sharded`` and ``Full``: parameters as pytrees, before and after a gather.

Both are registered in optree's global namespace and in ``torch.utils._pytree``, with key paths, so that
``optree.tree_map``, torchopt and every ``torch.func`` transform see tensors with a name and a static layout.
Unflattening does not validate, since a transform may put batched tensors, wrappers or ``None`` in the leaves; functions
that take a tree validate it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from ..containers import opened
from ..errors import name_problems, reject, table
from ..mesh.mesh import Mesh
from ..torch_internals.tensors import GLOBAL_NAMESPACE, torch_pytree
from .buffers import Buffer, dtype_name
from .layout import Layout, rank_dims

Node = TypeVar("Node", "Sharded", "Full")
_OF_TORCH_SAVE = 2


class Sharded(Mapping[str, Any]):
    """A tree of shards: buffer key -> this rank's 1-D part of that buffer, and the static ``layout``.

    Parameters, gradients, optimizer state and moving averages all have this structure, so ``tree_map`` combines them
    without communication. On a simulated mesh, outside ``spmd``, each shard has one leading rank dim per axis.
    """

    __slots__ = ("_shards", "layout")

    def __init__(self, shards: Mapping[str, Any] | Iterable[tuple[str, Any]], layout: Layout) -> None:
        given: Any = shards.items() if isinstance(shards, Mapping) else shards
        self._shards: dict[str, Any] = dict(given)
        self.layout = layout

    def __getitem__(self, key: str) -> Any:
        return self._shards[key]

    def __contains__(self, key: object) -> bool:
        return key in self._shards

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def keys(self) -> KeysView[str]:
        return self._shards.keys()

    def items(self) -> ItemsView[str, Any]:
        return self._shards.items()

    def on(self, mesh: Mesh) -> Sharded:
        """Return the same shards on another mesh of the same sizes: after unpickling, or with other backends."""
        return Sharded(self, self.layout.on(mesh))

    def __repr__(self) -> str:
        return _describe("Sharded", self._shards, "buffer", self.layout)


class Full(dict[str, Any]):
    """Whole parameters by name, in the source's order: a subclass of ``dict``, for ``functional_call``.

    Tied parameters are listed once, under their first name: ``functional_call`` ties the rest. Copies and pickles keep
    the layout; ``torch.save`` writes a plain state dict, which ``torch.load`` reads with its defaults.
    """

    __slots__ = ("layout",)

    def __init__(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], layout: Layout) -> None:
        super().__init__(tensors)
        self.layout = layout

    def copy(self) -> Full:
        return Full(self, self.layout)

    def __or__(self, other: Mapping[str, Any]) -> Full:
        """Return a ``Full`` with other values for some names, for example ``shard(full | edited, layout)``."""
        return Full({**self, **other}, self.layout)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch.save uses protocol 2, which copy and pickle do not use by default. It writes a state dict, which
        # torch.load reads with weights_only=True and without this package.
        if int(protocol) == _OF_TORCH_SAVE:
            return OrderedDict, (), None, None, iter(self.items())
        return Full, (dict(self), self.layout)

    def __repr__(self) -> str:
        return _describe("Full", self, "parameter", self.layout)


def is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def is_node(x: Any) -> bool:
    return isinstance(x, (Sharded, Full))


def map_items(fn: Callable[[str, Any], Any], tree: Node) -> Node:
    """Apply ``fn(key, leaf)`` to every leaf, in a tree of the same class and layout."""
    return type(tree)({key: fn(key, leaf) for key, leaf in tree.items()}, tree.layout)


def take_tensors(tree: Any) -> tuple[list[Tensor], Callable[[Iterable[Any]], Any]]:
    """The tensors of any pytree, and a function that replaces them in the tree by others."""
    leaves, treedef = optree.tree_flatten(opened(tree), none_is_leaf=True)

    def put_back(tensors: Iterable[Any]) -> Any:
        rest = iter(tensors)
        return optree.tree_unflatten(treedef, [next(rest) if isinstance(x, Tensor) else x for x in leaves])

    return [x for x in leaves if isinstance(x, Tensor)], put_back


def pack(tensors: Mapping[str, Tensor], buffer: Buffer, out: Tensor | None = None) -> Tensor:
    """Concatenate the parameters of ``buffer`` into one 1-D tensor, behind any batch dims, with zeros for padding.

    The gradient of one concatenation is one split, without padding. ``out`` may have another dtype.
    """
    like = tensors[buffer.slots[0].name]
    batch = like.shape[: like.ndim - len(buffer.slots[0].shape)]
    *gaps, last = buffer.split_sizes[::2]
    parts = list[Tensor]()
    for slot, gap in zip(buffer.slots, gaps, strict=True):
        parts += [like.new_zeros(*batch, gap)] if gap else []
        x = tensors[slot.name]
        parts += [x if x.ndim == 1 and not batch else x.reshape(*batch, slot.numel)] if slot.numel else []
    parts += [like.new_zeros(*batch, last)] if last or not parts else []
    return torch.cat(parts, -1) if out is None else torch.cat(parts, -1, out=out)


def unpack(flat: Tensor, buffer: Buffer) -> dict[str, Tensor]:
    """Copy the parameters out of ``flat``, behind any batch dims, each to memory of its own, for ``as_strided``.

    By one split and not by slices: the backward of every slice would allocate a zero buffer of full size.
    """
    parts: Any = torch.split_with_sizes_copy(flat, buffer.split_sizes, -1)  # its type has None, for out=
    pairs, batch = zip(buffer.slots, parts[1::2], strict=True), flat.shape[:-1]
    return {slot.name: part.view((*batch, *slot.shape)) for slot, part in pairs}


def _describe(kind: str, leaves: Mapping[str, Any], what: str, layout: Layout) -> str:
    rows = [
        (key, str(tuple(x.shape)), dtype_name(x.dtype)) if isinstance(x, Tensor) else (key, type(x).__name__, "")
        for key, x in leaves.items()
    ]
    return f"{kind} of {layout!r}\n" + table(rows, (what, "shape", "dtype"), left=3)


def ranks_here(mesh: Mesh) -> Sequence[int]:
    """The ranks of ``mesh`` in this process."""
    return range(mesh.size) if mesh.is_simulated else [mesh.rank]


def rows_here(x: Tensor, mesh: Mesh) -> dict[int, Tensor]:
    """The leaf of each rank in this process."""
    places = product(*map(range, mesh.axes.values())) if mesh.is_simulated else [()]
    return {rank: x[place] for rank, place in zip(ranks_here(mesh), places, strict=True)}


def is_number(x: Tensor, layout: Layout) -> bool:
    """Whether ``x`` is one number for its whole buffer, as a step count is, and not a shard."""
    return x.ndim == len(rank_dims(layout))


def participants_of(tree: Any) -> Mesh:
    """The mesh that a tree is sharded over; that of the job for a plain tree, or one with DTensors."""
    from ..mesh.init import job_mesh

    layouts = [node.layout for node in optree.tree_leaves(tree, is_leaf=is_node, none_is_leaf=True) if is_node(node)]
    return layouts[0].mesh if layouts and not any(layout.tensor_meshes for layout in layouts) else job_mesh()


def check_sharded(verb: str, tree: object, instead: str = "") -> None:
    """Raise unless ``tree`` is a ``Sharded``; ``instead`` ends the message."""
    if not isinstance(tree, Sharded):
        raise TypeError(f"{verb}: got {type(tree).__name__}, expected a Sharded{instead}.")


def check_layout(verb: str, layout: object) -> None:
    """Raise unless ``layout`` is a ``Layout``."""
    if not isinstance(layout, Layout):
        raise TypeError(f"{verb}: layout: got {type(layout).__name__}, expected a Layout from plan().")


def check_shards(verb: str, shards: Mapping[str, Any], layout: Layout, *, gradients: bool = False) -> None:
    """Raise unless every buffer has one shard of its shape and dtype, with rank dims outside ``spmd``.

    ``gradients`` may have another precision than the buffer, or be ``None``.
    """
    ranks = rank_dims(layout)
    problems = [] if shards.keys() == layout.buffers.keys() else name_problems(shards, layout.buffers)
    for key, x in shards.items():
        buffer = layout.buffers.get(key)
        if buffer is None or (gradients and x is None):
            continue
        shape, dtype = (*ranks, buffer.shard_numel), grad_dtype(x, buffer.dtype) if gradients else buffer.dtype
        if isinstance(x, Tensor) and x.shape == shape and x.dtype == dtype and x.layout is torch.strided:
            continue  # of each step
        problems += misfit(key, x, shape, dtype)
    if problems:
        reject(verb, problems, _SHARDS)


_SHARDS = (
    "Make the tree with shard(), from a layout of this mesh; outside of spmd it has rank dims. A tree that was "
    "unpickled has a mesh of its own: move it with tree.on(mesh)."
)


def misfit(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """The problem of what is not a dense tensor of this shape and dtype."""
    if not isinstance(x, Tensor):
        return [f"{name!r}: got {type(x).__name__}, expected a tensor of shape {shape}, {dtype}"]
    if x.shape == shape and x.dtype == dtype and x.layout is torch.strided:
        return []
    layout = "" if x.layout is torch.strided else f", {x.layout}"
    return [f"{name!r}: got shape {tuple(x.shape)}, {x.dtype}{layout}, expected {shape}, {dtype}"]


def grad_dtype(grad: Any, stored: torch.dtype) -> torch.dtype:
    """The expected dtype: a gradient may have another precision than its parameter, but not another kind of number."""
    alike = isinstance(grad, Tensor) and grad.is_complex() == stored.is_complex
    return grad.dtype if alike and grad.is_floating_point() == stored.is_floating_point else stored


def _register(cls: type[Sharded] | type[Full]) -> None:
    def flatten(tree: Any) -> tuple[list[Any], tuple[Layout, tuple[str, ...]], tuple[str, ...]]:
        held = tree._shards if cls is Sharded else tree
        keys = tuple(held)
        return list(held.values()), (tree.layout, keys), keys

    def unflatten(context: Any, leaves: Iterable[Any]) -> Sharded | Full:
        layout, keys = context
        return cls(zip(keys, leaves, strict=True), layout)

    def flatten_with_keys(tree: Any) -> tuple[list[Any], Any]:
        leaves, context, keys = flatten(tree)
        return [(torch_pytree.MappingKey(key), leaf) for key, leaf in zip(keys, leaves, strict=True)], context

    torch_pytree.register_pytree_node(
        cls,
        lambda tree: flatten(tree)[:2],
        lambda leaves, context: unflatten(context, leaves),
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"functorch_shard.{cls.__name__}",
    )
    optree.register_pytree_node(
        cls, flatten, unflatten, path_entry_type=optree.MappingEntry, namespace=GLOBAL_NAMESPACE
    )


_register(Sharded)
_register(Full)
