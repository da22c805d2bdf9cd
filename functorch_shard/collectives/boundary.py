"""Who takes the mean over ranks: ``fs.grad`` at its end, or the backward of each gather.

Note [Boundary]: each rank's program returns a value of its own, and what is differentiated is the mean of them (or the
sum). ``fs.grad`` takes that mean once, at its boundary: inside, every gather is an exact all-gather whose transpose is
an exact ``psum_scatter``, so a derivative that goes through several gathers, a training step say, is exact as well. At
the end, gradients with respect to ``Sharded`` arguments are summed over copies and divided by the number of ranks: in
place where a reduction made the memory and handed it to the boundary, and nowhere else.

A derivative by anybody else (``torch.func.grad``, ``backward()``) has no such end. There the backward of each gather
takes the mean, which is the same where a path of the derivative goes through one gather, and is refused where it goes
through two.

Which of the two it is depends on the level of autograd that is differentiated: 0 is plain autograd, and each transform
of torch.func has a number above the one around it. ``fs.grad`` opens a boundary for its level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..torch_internals.autograd import Function, backward_comes_to, differentiates_twice, nodes, nodes_behind
from ..torch_internals.tensors import hooks_of
from ..torch_internals.transforms import current_level


class Boundary:
    """One call of ``fs.grad``, at its level. While its function runs, derivatives there are somebody else's.

    Args:
        inputs: the leaves to differentiate with respect to, if the caller adds :attr:`totals` to their gradients.
        tangents_alone: whether the caller uses only the tangent of the gradient, in the jvp around the call.
    """

    def __init__(self, inputs: Sequence[Tensor] = (), tangents_alone: bool = False) -> None:
        self.tangents_alone = tangents_alone
        self.totals: dict[int, Tensor] = {}  # terms of gradients of inputs by position, in memory that is this one's
        self._positions = {id(x): i for i, x in enumerate(inputs)}
        self.uses_none = False  # whether this rank's value depends on no leaf of an argument: Note [Unused units]
        self.reached = False  # whether the function has returned: what is differentiated now, this call differentiates
        self.anchors: list[Tensor] = []  # outputs to differentiate along with the result, see Note [Unused units]
        self.averaged: set[int] = set()  # inputs by position whose gradients are means already: Note [Overlapped means]

    def take(self, total: Tensor, edge: Any) -> Tensor | None:
        """Add ``total``, which its caller made, to the gradient of the input at ``edge``; return it if none is there.

        What is taken does not pass through autograd, which may hand one tensor to several inputs.
        """
        leaf = getattr(edge, "variable", None)
        i = self._positions.get(id(leaf))
        if i is None or leaf is None or hooks_of(leaf):
            return total
        self.totals[i] = plus(total, self.totals.get(i))
        return None

    def take_anchors(self) -> list[Tensor]:
        """The anchors, which are let go here: their nodes know this boundary."""
        anchors, self.anchors = self.anchors, []
        return anchors


def plus(total: Tensor, other: Tensor | None) -> Tensor:
    """The sum of both, written to ``total`` if that has its dtype."""
    if other is None:
        return total
    return total.add_(other) if torch.promote_types(total.dtype, other.dtype) == total.dtype else total + other


_OPEN: ContextVar[Mapping[int, Boundary]] = ContextVar("boundaries of fs.grad, by level", default={})  # noqa: B039
_NOTED: ContextVar[list[bool] | None] = ContextVar("whether nodes that take the mean were made", default=None)


@contextmanager
def new_boundary(inputs: Sequence[Tensor] = (), tangents_alone: bool = False) -> Iterator[Boundary]:
    """A boundary at the current level, around the function that is differentiated."""
    boundary = Boundary(inputs, tangents_alone)
    token = _OPEN.set({**_open(), current_level(): boundary})
    try:
        yield boundary
    except BaseException:
        boundary.take_anchors()
        raise
    finally:
        _OPEN.reset(token)
        boundary.reached = True


@contextmanager
def no_boundary() -> Iterator[None]:
    """A context without a boundary at the current level."""
    level = current_level()
    token = _OPEN.set({other: boundary for other, boundary in _open().items() if other != level})
    try:
        yield
    finally:
        _OPEN.reset(token)


@contextmanager
def means_noted() -> Iterator[list[bool]]:
    """A list that is not empty once a node of the kind that may take the mean was made inside of this context."""
    noted: list[bool] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)
    note_means(bool(noted))


def note_means(averages: bool) -> None:
    """Note for :func:`means_noted` that a node which may take the mean was made."""
    noted = _NOTED.get()
    if averages and noted is not None:
        noted.append(True)


def with_mean_behind(x: Tensor) -> Tensor:
    """Return ``x``, an input of a recomputed part, with a node for the mean taken behind it in another graph."""
    return _MeanBehind.apply(x)


class _MeanBehind(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.averages = True

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return _MeanBehind.apply(x), in_dims[0]


def _open() -> Mapping[int, Boundary]:
    """The boundaries whose functions still run: the context of a node's forward may have others too."""
    return {level: boundary for level, boundary in _OPEN.get().items() if not boundary.reached}


def inside() -> bool:
    """Whether a function that ``fs.grad`` differentiates is running."""
    return bool(_open())


def here() -> Boundary | None:
    """The boundary of the level that a ``setup_context`` is called for."""
    return _open().get(current_level())


def anchors_here() -> list[Tensor] | None:
    """Where an anchor is to be put; ``None`` where it is not differentiated, which an outermost ``fs.grad`` does."""
    boundary = _open().get(0)
    return None if boundary is None else boundary.anchors


def prepare(ctx: Any, transposes: bool) -> None:
    """In ``setup_context`` of a node that may take the mean: keep what :func:`takes_mean` asks in its backward.

    Args:
        transposes: whether taking the mean is the transpose of what the node does in forward.
    """
    ctx.boundary, ctx.differentiated_twice_by = here(), None if transposes else differentiates_twice()
    note_means(getattr(ctx, "averages", False))


def takes_mean(ctx: Any) -> bool:
    """Whether the node ``ctx`` takes the mean itself, in the backward that is running.

    Raises:
        RuntimeError: it does, and so would another one that this derivative is about to go through. Or this is half of
            a second derivative that takes backward for the transpose of forward, and the mean is not.
    """
    if ctx.boundary is not None and ctx.boundary.reached:
        return False
    if ctx.differentiated_twice_by and torch.is_grad_enabled():
        raise RuntimeError(_NOT_THE_TRANSPOSE.format(ctx.differentiated_twice_by))
    if any(map(_is_averaged, nodes(*nodes_behind(ctx)))):
        raise RuntimeError(_TWICE)
    return True


def reduces_tangents_alone(ctx: Any) -> bool:
    """Whether only the tangent of what the node ``ctx`` returns is used: its boundary's, and nothing computes with it.

    Further backward would compute with the gradient itself, as where a gather's shards were computed.
    """
    boundary = ctx.boundary
    if boundary is None or not (boundary.reached and boundary.tangents_alone):
        return False
    return all(_hands_on(node) for node in nodes(*nodes_behind(ctx)))


def _hands_on(node: Any) -> bool:
    """Whether ``node`` is an input of what is differentiated, or returns the gradient that it gets.

    An input's hooks compute with the gradient.
    """
    if hasattr(node, "variable"):
        return not hooks_of(node.variable)
    return getattr(node, "hands_on", False)


def has_mean_behind(edge: Any) -> bool:
    """Whether the backward pass that is running takes a mean at the node ``edge``, or behind it."""
    return any(map(_is_averaged, nodes(edge)))


def _is_averaged(node: Any) -> bool:
    return getattr(node, "averages", False) and backward_comes_to(node)


_TWICE = (
    "gather: this derivative goes through a gather of values that were computed from another gather, as in a gradient "
    "through a training step. torch.func.grad and backward() would take the mean over ranks at each of them. Let the "
    "outermost reverse-mode derivative be fs.grad (or fs.grad_and_value), which takes it once; inside, either will do."
)
_NOT_THE_TRANSPOSE = (
    "gather: torch.autograd.functional.{} takes the backward of gather for its transpose. It is the mean (or the sum) "
    "over ranks, and the result would be off by a factor. Use forward mode: torch.func.jvp(loss, (params,), (v,)), and "
    "for the product of the Hessian with v torch.func.jvp(fs.grad(loss), (params,), (v,))."
)
