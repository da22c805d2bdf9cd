"""The autograd Functions of collectives: linear maps of the values of all ranks, and their maximum.

Torch's own collectives cannot stand below these under torch.func: there they give silent zeros (grad, jvp) or garbage
(vmap). ``index`` and ``others`` are operands that are batched at the level of vmap of the axis, and at those of the
other axes: Note [Ranks as a batch axis] in mesh/mesh.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ..communication.backend import Axis
from ..communication.collective import KINDS, Splits
from ..torch_internals.autograd import Function, with_outer_tangents

_COPY = "copy"  # of one value for each rank to use, where what ranks do with it adds up


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A collective of ``kind`` over ``axis``, whose transpose is of the kind ``transposed``.

    Args:
        dim: along which it gathers or scatters, from the last, as batch dims are in front; 0 if it does neither.
        source, splits: see :class:`Collective`. A broadcast is the transpose of a sum if its operand is zero on all
            ranks but the source, where it is a sum itself. A ragged exchange pads to the longest result of any rank.
    """

    axis: Axis
    kind: str = "psum"
    transposed: str = "psum"
    dim: int = 0
    source: int = 0
    splits: Splits = ()

    @property
    def derivative(self) -> LinearMap:
        return self

    @property
    def transpose(self) -> LinearMap:
        splits: Splits = tuple(zip(*self.splits, strict=True))
        if self.kind == "ppermute":
            splits = tuple((to, sender) for sender, to in self.splits)
        return replace(self, kind=self.transposed, transposed=self.kind, splits=splits)

    @property
    def is_scattered(self) -> bool:
        """Whether each rank has a result of its own."""
        return KINDS[self.kind].is_scattered

    def __call__(self, x: Tensor, ndim: int) -> Tensor:
        """Apply it to ``x``, which has a dim of ranks in front of ``ndim`` others at the level of simulated ranks."""
        if self.kind == _COPY:
            return x.view_as(x)
        dim = 0 if self.kind == "psum" else self.dim % max(ndim, 1)  # a sum has none, and ranks compare it
        source = self.source if self.kind == "broadcast" else 0
        result = self.axis.issue(self.kind, x, dim=dim, source=source, splits=self.splits).wait()
        if self.kind != "ragged_all_to_all":
            return result
        return resized(result, max(map(sum, zip(*self.splits, strict=True))))


class Linear(Function):
    """A :class:`LinearMap`, or what has its attributes; one object, as torch.func flattens arguments as pytrees."""

    @staticmethod
    def forward(x: Tensor, index: Tensor | None, others: Tensor | None, linear: Any) -> Tensor:
        return linear(x, x.ndim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *place, linear = saved(ctx)
        return Linear.apply(grad, *place, linear.transpose), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        *place, linear = saved(ctx)
        return Linear.apply(tangent, *place, linear.derivative)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, linear: Any) -> Any:
        if in_dims[1] is None:
            x, batch_dim = aside(x, in_dims[0])
            return Linear.apply(x, index, others, replace(linear, axis=fold(linear.axis, info, in_dims))), batch_dim
        rows = stack(x, in_dims[0], linear.axis)
        return linear(rows, rows.ndim - 1), 0 if linear.is_scattered else None


class Maximum(Function):
    """The largest value over the ranks of ``total.axis``; ``total`` adds up the cotangents of its copies."""

    @staticmethod
    def forward(x: Tensor, index: Tensor | None, others: Tensor | None, total: LinearMap) -> Tensor:
        return total.axis.issue("pmax", x).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, *place, total = inputs
        ctx.static = [total]
        ctx.save_for_backward(x, output, *place)
        ctx.save_for_forward(x, output, *place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, largest, *place, total = saved(ctx)
        return Linear.apply(grad, *place, total.transpose) * _share(x, largest, place, total), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        x, largest, *place, total = saved(ctx)
        with with_outer_tangents():
            return Linear.apply(tangent * _share(x, largest, place, total), *place, total)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, total: LinearMap) -> Any:
        if in_dims[1] is None:
            x, batch_dim = aside(x, in_dims[0])
            return Maximum.apply(x, index, others, replace(total, axis=fold(total.axis, info, in_dims))), batch_dim
        return total.axis.issue("pmax", stack(x, in_dims[0], total.axis)).wait(), None


def _share(x: Tensor, largest: Tensor, place: Any, total: LinearMap) -> Tensor:
    """What part of the result's derivative belongs to this rank: 1 / (number of winners) for a winner, or 0."""
    wins = (x == largest).to(x.dtype)
    return wins / Linear.apply(wins, *place, LinearMap(total.axis))


def shared_sum(x: Tensor, axis: Axis) -> Tensor:
    """``psum`` over real ranks that compute one loss together, as those that share a DTensor do.

    By ``psum`` the gradient counts every rank's use of the result, which is right where each rank returns a loss of its
    own. A loss that is the same on all ranks counts once: the sum hands its gradient on unchanged.
    """
    return Linear.apply(x, None, None, LinearMap(axis, transposed=_COPY))


def shared_max(x: Tensor, axis: Axis) -> Tensor:
    """``pmax`` over real ranks that compute one loss together."""
    return Maximum.apply(x, None, None, LinearMap(axis, transposed=_COPY))


def resized(x: Tensor, longest: int) -> Tensor:
    """``x`` with ``longest`` elements in its last dim: the first ones, or followed by zeros."""
    return pad(x, (0, longest - x.shape[-1])) if x.shape[-1] != longest else x


def place_of(axis: Axis) -> tuple[Tensor | None, Tensor | None]:
    """The operands that distinguish vmap levels; real ranks need neither."""
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
    axes = (getattr(x, "axis", None) for x in getattr(node, "static", ()))
    return next((x for x in axes if isinstance(x, Axis)), None)


def aside(x: Tensor, batch_dim: int | None, to: int = 0) -> tuple[Tensor, int | None]:
    """At a level of somebody else: ``x`` with the batch dim out of the way, and where that is."""
    return (x, None) if batch_dim is None else (x.movedim(batch_dim, to), to)


def fold(axis: Any, info: Any, in_dims: Any) -> Any:
    """``axis``, knowing how many values of other simulated ranks are folded into its operand, to count per rank."""
    of_ranks = isinstance(axis, Axis) and in_dims[0] is not None and in_dims[2] is not None
    return replace(axis, folded=axis.folded * info.batch_size) if of_ranks else axis


def stack(x: Tensor, dim: int | None, axis: Axis) -> Tensor:
    """The values of all ranks in dim 0; a value without a batch dim is the same on every rank."""
    return x.expand(axis.backend.rows(axis.size), *x.shape) if dim is None else x.movedim(dim, 0)
