"""Between two layouts of the same buffers: in one, ranks have copies of what they have parts of in the other.

Note [Placements]: parameters, gradients and the state of an optimizer may each be sharded over axes of their own. The
layout with the most shards, ``plan(shard_axis=(..., axis))``, is that of what is sharded most, mostly the state; others
are ``layout.with_copies(axis)``: the same buffers, of which a shard is several of the first side by side. So going from
copies to parts is a slice, from parts to copies one all-gather, and gradients that are still to be added up over the
copies become parts by one reduce-scatter. ZeRO-1, ZeRO-2, and an optimizer over all ranks of parameters that are
sharded within a node, are programs of these three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..collectives.primitives import all_gather
from ..communication.axis import Axis
from ..eager import eager
from ..errors import first_difference, reject
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..layout.trees import Sharded
from ..layout.validation import check_sharded
from ..mesh.mesh import Mesh
from ..storage.memory_kind import to_memory_kind_of, to_working_device
from .reduction import over_replicas, part_over_replicas
from .replicas import without_replicas


@eager
def parts_of(tree: Sharded, layout: Layout) -> Sharded:
    """This rank's part of what it has a copy of: from ``layout.with_copies(...)`` to ``layout``.

    The inverse of :func:`copies_of`, for trees whose copies are equal.

    Args:
        tree: parameters, gradients that are reduced (by ``across_replicas``), or averages.
        layout: that of the parts.

    Returns:
        A ``Sharded`` with ``layout``. On real ranks its tensors are views of those of ``tree``.

    Raises:
        TypeError: ``tree`` is not a ``Sharded``, or ``layout`` not a layout.
        ValueError: ``tree`` does not have the layout ``layout.with_copies(...)``.

    Cost:
        Nothing is communicated.

    Example:
        >>> mesh = fs.simulated_mesh({"shard": 2})
        >>> states = fs.plan({"w": torch.zeros(4)}, mesh)
        >>> params = fs.shard({"w": torch.arange(4.0)}, states.with_copies("shard"))
        >>> params["(root)"]                           # row r = rank r
        tensor([[0., 1., 2., 3.],
                [0., 1., 2., 3.]])
        >>> parts_of(params, states)["(root)"]
        tensor([[0., 1.],
                [2., 3.]])
    """
    axis = _axis("parts_of: tree", tree, layout, lambda copied: copied)

    def part(x: Tensor, buffer: Buffer) -> Tensor:
        return _own(x, axis) if buffer.num_shards > 1 else x

    return _each(tree, layout, layout.mesh, parts_of, part)


@eager
def copies_of(tree: Sharded, layout: Layout) -> Sharded:
    """Copies of what ranks have parts of: from ``states`` to ``layout``, which is ``states.with_copies(...)``.

    Args:
        tree: for example parameters after a step of :func:`parts_of` them.
        layout: that of the result.

    Returns:
        A ``Sharded`` with ``layout``; new tensors.

    Raises:
        TypeError: ``tree`` is not a ``Sharded``, or ``layout`` not a layout.
        ValueError: ``layout`` is not ``tree.layout.with_copies(...)``.

    Cost:
        One all-gather per buffer over the axes that have copies. Differentiable: that of ``collectives.all_gather``.

    Example:
        >>> mesh = fs.simulated_mesh({"shard": 2})
        >>> states = fs.plan({"w": torch.zeros(4)}, mesh)
        >>> copies_of(fs.shard({"w": torch.arange(4.0)}, states), states.with_copies("shard"))["(root)"]
        tensor([[0., 1., 2., 3.],
                [0., 1., 2., 3.]])
    """
    check_sharded("copies_of: tree", tree)
    states = tree.layout
    axis = _axis("copies_of: layout", Sharded({}, layout), states, lambda copied: copied)

    def copies(x: Tensor, buffer: Buffer) -> Tensor:
        near = to_working_device(x, layout.mesh.device)
        sharded = states.buffers[buffer.key].num_shards > 1
        return to_memory_kind_of(all_gather(near, axis.of(buffer.key)), x) if sharded else x

    return _each(tree, layout, states.mesh, copies_of, copies)


@eager
def reduce_to_parts(grads: Sharded, layout: Layout) -> Sharded:
    """The other half of the reduction of the gradients of ``within_replicas(params)``, each rank keeping its part.

    Bitwise ``parts_of(across_replicas(grads, layout.with_copies(...)), layout)``, for half of the bytes.

    Args:
        grads: the gradients of ``within_replicas(params)``, or a sum of them over microbatches; ``None`` stays.
        layout: that of the result; the parameters have ``layout.with_copies(...)``.

    Returns:
        A ``Sharded`` with ``layout``: the mean over all ranks (the sum, with ``reduction="sum"``).

    Raises:
        TypeError: ``grads`` is not a ``Sharded``, or ``layout`` not a layout.
        ValueError: gradients of another layout, or that are reduced over copies already.

    Cost:
        One reduce-scatter per trainable buffer over the axes that have copies. Differentiable.

    Example:
        >>> mesh = fs.simulated_mesh({"shard": 2})
        >>> states = fs.plan({"w": torch.zeros(4)}, mesh)
        >>> params = fs.shard({"w": torch.ones(4)}, states.with_copies("shard"))
        >>> loss = lambda params, x: (fs.gather(params)["w"] * x).sum()
        >>> grads = mesh.spmd(fs.grad(loss))(fs.replicas.within_replicas(params), torch.tensor([1.0, 3.0]))
        >>> reduce_to_parts(grads, states)["(root)"]
        tensor([[2., 2.],
                [2., 2.]])
    """
    axis = _axis("reduce_to_parts: grads", grads, layout, without_replicas)
    copied = layout.with_copies(*axis.name.split(","))

    def reduced(x: Tensor, buffer: Buffer) -> Tensor:
        near, sharded = to_working_device(x, layout.mesh.device), buffer.num_shards > 1
        whole = copied.buffers[buffer.key]
        total = part_over_replicas(near, whole, copied, axis) if sharded else over_replicas(near, whole, copied)
        return to_memory_kind_of(total, x)

    return _each(grads, layout, layout.mesh, reduce_to_parts, reduced)


def _each(
    tree: Sharded,
    layout: Layout,
    mesh: Mesh,
    again: Callable[[Sharded, Layout], Sharded],
    change: Callable[[Tensor, Buffer], Tensor],
) -> Sharded:
    """``change`` of every shard; ``None``, and numbers for a whole buffer, stay."""
    if not mesh.in_spmd:
        return mesh.spmd(lambda tree: again(tree, layout))(tree)
    unknown = [f"{key!r}: not in the layout" for key in tree if key not in layout.buffers]
    reject(f"{again.__name__}: tree", unknown, "Pass a tree that has the buffers of its layout.")
    shards = {key: change(x, layout.buffers[key]) if isinstance(x, Tensor) and x.ndim else x for key, x in tree.items()}
    return Sharded(shards, layout)


def _axis(what: str, tree: Any, layout: Any, form: Callable[[Layout], Layout]) -> Axis:
    """The axis along which ``tree`` has copies of parts in ``layout``; ``form`` of that layout with copies is its."""
    check_sharded(what, tree)
    if not isinstance(layout, Layout):
        raise TypeError(f"{what}: layout: got {type(layout).__name__}, expected a Layout")
    axes = layout.shard_axes
    options = [form(layout.with_copies(*axes[i:])) for i in range(len(axes))]
    found = [i for i, option in enumerate(options) if option == tree.layout]
    if not found:
        mine, theirs = first_difference(options[-1].lines(), tree.layout.lines()) or ("", "")
        raise ValueError(f"{what}: {theirs}, expected {mine}. One layout has to be with_copies(...) of the other.")
    return layout.mesh[",".join(axes[found[0] :])]


def _own(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part of the last dim."""
    index, parts = axis.backend.index(), x.unflatten(-1, (axis.size, x.shape[-1] // axis.size))
    if isinstance(index, Tensor):
        return parts.index_select(-2, index.reshape(1).to(x.device)).squeeze(-2)
    return parts.select(-2, index)
