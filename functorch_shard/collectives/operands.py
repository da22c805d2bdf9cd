"""What the Functions of collectives share: operands that distinguish levels of vmap, and batch dims out of the way.

See Note [Ranks as a batch axis] in mesh.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..communication.axis import Axis


def place_of(axis: Axis) -> tuple[Tensor | None, Tensor | None]:
    """The operands that distinguish vmap levels: batched at the level of the axis, and at those of the other axes.

    Real ranks need neither.
    """
    index = axis.backend.level()
    return (index, axis.backend.others()) if isinstance(index, Tensor) else (None, None)


def save_static(ctx: Any, inputs: tuple[Any, ...]) -> None:
    index, others, *ctx.static = inputs
    ctx.save_for_backward(index, others)
    ctx.save_for_forward(index, others)


def saved(ctx: Any) -> tuple[Any, ...]:
    return (*ctx.saved_tensors, *ctx.static)


def axis_of(node: Any) -> Axis | None:
    """The axis that a node of the graph communicates over, if it does."""
    held = (node, *getattr(node, "static", ()))  # an axis, or what has one
    axes = (x if isinstance(x, Axis) else getattr(x, "axis", None) for x in held)
    return next((x for x in axes if isinstance(x, Axis)), None)


def aside(x: Tensor, batch_dim: int | None, to: int = 0) -> tuple[Tensor, int | None, int]:
    """At a level of somebody else: ``x`` with the batch dim out of the way, where it is, and what it shifts dims by."""
    return (x, None, 0) if batch_dim is None else (x.movedim(batch_dim, to), to, 1)


def fold(axis: Any, info: Any, in_dims: Any) -> Any:
    """``axis``, knowing how many values of other simulated ranks are folded into its operand, to count per rank."""
    of_ranks = isinstance(axis, Axis) and in_dims[0] is not None and in_dims[2] is not None
    return replace(axis, folded=axis.folded * info.batch_size) if of_ranks else axis


def stack(x: Tensor, dim: int | None, axis: Axis) -> Tensor:
    """The values of all ranks in dim 0; a value without a batch dim is the same on every rank."""
    return x.expand(axis.backend.rows(axis.size), *x.shape) if dim is None else x.movedim(dim, 0)
