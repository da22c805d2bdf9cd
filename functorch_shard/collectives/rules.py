"""The autograd Functions of collectives: linear maps of the values of all ranks, and the data-parallel gather and
reduction of a buffer.

Torch's own collectives cannot stand below these under torch.func: there they give silent zeros (grad, jvp) or garbage
(vmap). ``index`` and ``others`` are operands that are batched at the level of vmap of the axis, and at those of the
other axes: Note [Ranks as a batch axis] in mesh/mesh.py.

Note [Schedule]: a shard becomes the whole buffer by ``gather``; a full gradient becomes the exact sum over the ranks
that share the buffer by ``within``, the transpose of ``gather``; that sum becomes the mean over all ranks by
``across``::

    gather   cast to gathered, all-gather over the shard axis
    within   cast to reduced, divide by before, reduce-scatter over the shard axis, cast to carried, multiply by before
    across   divide by before, cast to reduced, all-reduce over each axis of copies, cast to carried, divide by after

Without a shard axis there is no all-gather and ``within`` is a cast. ``before`` is a power of two, so a division by it
is undone exactly. A :class:`Schedule` has what is done in front of a collective and behind it. ``gathered``, ``within``
and ``across`` below are differentiable; the first two are one Function, whose backward applies the other of them.
``across`` is not a transpose: it is where the mean over ranks is taken, unless ``fs.grad`` takes it, Note [Boundary].
The lazy gather issues the same asynchronously (``sharding/session.py``, ``sharding/reduction.py``), and so its numbers
are equal bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isclose, prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..communication.backend import Axis, Finished, Work
from ..communication.collective import KINDS, Splits, sum_in_rank_order
from ..torch_internals.autograd import Function, is_functorch_wrapped_tensor
from .sinks import prepare

COPY = "copy"  # of one value for each rank to use, where what ranks do with it adds up


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A collective of ``kind`` over ``axis``, whose transpose is of the kind ``transposed``.

    A broadcast is the transpose of a sum if its operand is zero on all ranks but the source, where it is a sum itself.
    A ragged exchange pads to the longest result of any rank.
    """

    axis: Axis
    kind: str
    transposed: str
    dim: int = 0  # along which it gathers or scatters, from the last, as batch dims are in front; 0 if it does neither
    source: int = 0
    splits: Splits = ()
    mean: bool = False  # whether the sum is divided by the number of ranks behind it

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
        if self.kind == COPY:
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

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, linear: Any) -> Any:
        if in_dims[1] is None:
            x, batch_dim = aside(x, in_dims[0])
            return cls.apply(x, index, others, replace(linear, axis=fold(linear.axis, info, in_dims))), batch_dim
        rows = stack(x, in_dims[0], info.batch_size)
        return linear(rows, rows.ndim - 1), 0 if linear.is_scattered else None


def linear_map_of(x: Tensor, linear: LinearMap) -> Tensor:
    """``linear`` of ``x``, which on one rank is a copy."""
    return Linear.apply(x, *linear.axis.backend.place(), linear) if linear.axis.size > 1 else x.clone()


Divide = Callable[[Tensor, float], Tensor]


class Encoding(Protocol):
    """What a gather sends in place of elements: ``codecs.RowEncoding``."""

    def gather(self, x: Tensor, size: int, send: Callable[[Tensor], Work]) -> Work: ...

    def recode(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Schedule:
    """The way of one buffer, Note [Schedule]: its dtypes, the axes it is communicated over, and the divisors."""

    stored: torch.dtype
    gathered: torch.dtype
    reduced: torch.dtype
    returned: torch.dtype
    shard_axis: Axis | None
    copies: tuple[Axis, ...]  # axes whose ranks hold the same shard
    before: float
    after: float

    @cached_property
    def carried(self) -> torch.dtype:
        """The dtype of a sum that was reduced, until it is divided: nothing of it is lost or overflows."""
        if not self.stored.is_floating_point:
            return self.stored
        wide = torch.promote_types(self.stored, self.reduced)
        return torch.promote_types(wide, torch.float32) if self.reduced == torch.float16 else wide

    @cached_property
    def has_mean(self) -> bool:
        """Whether the mean over all ranks differs from the transpose of ``gather``."""
        return bool(self.copies) or (self.before, self.after) != (1, 1)

    @cached_property
    def divisor(self) -> float:
        """What the sum over all ranks is divided by."""
        return self.before * self.after

    @cached_property
    def mean_is_transpose(self) -> bool:
        """Whether ``across`` is the transpose of making equal copies."""
        return isclose(self.divisor, prod(axis.size for axis in self.copies))

    def to_sum(self, x: Tensor, divide: Divide = torch.div) -> Tensor:
        """What is reduce-scattered of the full gradient ``x``."""
        x = x.to(self.reduced)
        return x if self.before == 1 else divide(x, self.before)

    def total(self, x: Tensor, divide: Divide = torch.div) -> Tensor:
        """The sum over the ranks that share the buffer, of what was reduce-scattered."""
        x = x.to(self.carried)
        return x if self.before == 1 else divide(x, 1 / self.before)

    def to_average(self, x: Tensor, divide: Divide = torch.div) -> Tensor:
        """What is all-reduced over each axis of copies of the sum ``x``."""
        return (x if self.before == 1 else divide(x, self.before)).to(self.reduced)

    def mean(self, x: Tensor, divide: Divide = torch.div) -> Tensor:
        """The mean over all ranks, or their sum, of what was all-reduced."""
        x = x.to(self.carried)
        return x if self.after == 1 else divide(x, self.after)

    def across(self, x: Tensor, psum: Callable[[Tensor, Axis], Tensor], divide: Divide = torch.div) -> Tensor:
        """The mean over all ranks, or their sum, of the sum ``x``."""
        x = self.to_average(x, divide)
        for axis in self.copies:
            x = psum(x, axis)
        return self.mean(x, divide)

    def reduce(self, x: Tensor, mean: bool) -> Work:
        """Start ``within`` of the full gradient ``x``, which is overwritten, and with ``mean`` ``across`` behind it."""

        def complete(total: Tensor) -> Tensor:
            psum = lambda x, axis: axis.issue("psum", x).wait()  # noqa: E731
            return self.across(total, psum, Tensor.div_).to(self.stored) if mean else total

        if self.shard_axis is None:
            return Finished(x.to(self.carried)).then(complete)
        work = self.shard_axis.issue("psum_scatter", self.to_sum(x, Tensor.div_))
        return work.then(lambda total: complete(self.total(total, Tensor.div_)))


def gathered(x: Tensor, schedule: Schedule, codec: Encoding | None = None) -> Tensor:
    """The whole buffer of the shards ``x``, through ``codec`` if one is given; the derivative is that without it."""
    axis = schedule.shard_axis
    if axis is None:
        return x.to(schedule.gathered)
    return Linear.apply(x, *axis.backend.place(), _Map(axis, schedule, False, codec))


def within(x: Tensor, schedule: Schedule) -> Tensor:
    """The shard of the sum of the full gradients ``x`` over the ranks that share the buffer."""
    axis = schedule.shard_axis
    if axis is None:
        return x.to(schedule.carried)
    return Linear.apply(x, *axis.backend.place(), _Map(axis, schedule, True))


def across(x: Tensor, schedule: Schedule) -> Tensor:
    """The mean over all ranks (or the sum) of what ``within`` returned."""
    return schedule.across(x, lambda x, axis: _sum(x, axis, *axis.backend.place()))


@dataclass(frozen=True, eq=False)
class _Map:
    """``gather`` of a schedule over ``axis``, or ``within``, which leaves each rank a result of its own.

    Ranks are laid side by side in the last dim, behind any batch dims.
    """

    axis: Axis
    schedule: Schedule
    is_scattered: bool
    codec: Encoding | None = None

    @property
    def derivative(self) -> _Map:
        return replace(self, codec=None)

    @property
    def transpose(self) -> _Map:
        return replace(self, codec=None, is_scattered=not self.is_scattered)

    def __call__(self, x: Tensor, ndim: int) -> Tensor:
        issue, schedule = partial(self.axis.issue, dim=ndim - 1), self.schedule
        if self.is_scattered:
            return schedule.total(issue("psum_scatter", schedule.to_sum(x)).wait())
        if self.codec and schedule.stored.is_floating_point:
            send = partial(issue, "all_gather")
            return self.codec.gather(x.to(schedule.stored), self.axis.size, send).wait().to(schedule.gathered)
        return issue("all_gather", x.to(schedule.gathered)).wait().contiguous()


def averaged(x: Tensor, schedule: Schedule) -> Tensor:
    """``x``, as a value that ranks hold copies of: its gradient is the mean of theirs, by ``schedule.across``.

    Unless ``fs.grad`` takes the mean: Note [Boundary]. The gradient comes in the dtype that sums are carried in, if
    ``x`` can have one of that dtype. Forward mode passes the tangent through, as the copies' tangents are equal.
    """
    if not schedule.has_mean and x.dtype == schedule.carried:
        return x
    axes = schedule.copies or (None,)
    for i, axis in reversed([*enumerate(axes)]):  # backward goes from the first to the last
        place, copies = ((None, None), ()) if axis is None else (axis.backend.place(), (axis,))
        before, after = 1 if i else schedule.before, schedule.after if i == len(axes) - 1 else 1
        part = replace(schedule, copies=copies, before=before, after=after)
        takes = i == 0 and schedule.has_mean
        x = _Averaged.apply(x, *place, _Mean(axis, part, schedule.mean_is_transpose, takes))
    return x


@dataclass(frozen=True, eq=False)
class _Mean:
    """``across`` of a schedule with one axis of copies, or ``None`` once its ranks are rows; one object as a map is."""

    axis: Axis | None
    schedule: Schedule
    is_transpose: bool
    averages: bool  # the one of several that takes the mean

    def __call__(self, grad: Tensor, index: Tensor | None, others: Tensor | None) -> Tensor:
        return self.schedule.across(grad, lambda x, _: _sum(x, self.axis, index, others))


def _sum(x: Tensor, axis: Axis | None, index: Tensor | None, others: Tensor | None) -> Tensor:
    if axis is None:  # outside of the level of simulated ranks, which are the rows of x
        return sum_in_rank_order(x.unbind(0)).expand_as(x)
    return Linear.apply(x, index, others, LinearMap(axis, "psum", "psum"))


class _Averaged(Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor | None, others: Tensor | None, mean: _Mean) -> Tensor:
        carried = mean.schedule.carried
        return x.view_as(x) if x.dtype == carried else x.to(carried)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])
        prepare(ctx, inputs[3].averages, inputs[3].is_transpose)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *place, mean = saved(ctx)
        if mean.schedule.has_mean:
            averages, (grad,) = ctx.sink.start(ctx, [grad])
            grad = mean(grad, *place) if averages else grad
        return grad, None, None, None  # autograd casts it to the dtype of x, unless x.grad_dtype is None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _Averaged.apply(tangent, *saved(ctx))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, mean: _Mean) -> Any:
        if in_dims[1] is None:
            x, batch_dim = aside(x, in_dims[0], -1)  # rows, where there are any, stay in dim 0
            if mean.axis is None and not (x.requires_grad or is_functorch_wrapped_tensor(x)):
                return _Averaged.forward(x, index, others, mean), batch_dim  # nobody outside differentiates it
            folded = replace(mean, axis=fold(mean.axis, info, in_dims))
            return _Averaged.apply(x, index, others, folded), batch_dim
        return _Averaged.apply(stack(x, in_dims[0], info.batch_size), None, None, replace(mean, axis=None)), 0


def resized(x: Tensor, longest: int) -> Tensor:
    """``x`` with ``longest`` elements in its last dim: the first ones, or followed by zeros."""
    return pad(x, (0, longest - x.shape[-1])) if x.shape[-1] != longest else x


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


def stack(x: Tensor, dim: int | None, num_rows: int) -> Tensor:
    """The values of all ranks in dim 0; a value without a batch dim is the same on every rank."""
    return x.expand(num_rows, *x.shape) if dim is None else x.movedim(dim, 0)
