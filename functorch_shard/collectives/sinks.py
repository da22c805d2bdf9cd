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
of torch.func has a number above the one around it. A gather gets the :class:`Sink` of its level when its node is made,
and its node hands gradients to it. ``fs.grad`` puts its own sink, the boundary, at its level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..communication.writes import Gathered
from ..torch_internals.autograd import (
    Function,
    backward_comes_to,
    hooks_of,
    in_transform,
    is_functorch_wrapped_tensor,
    nodes,
    nodes_behind,
)


class Sink:
    """Where gradients of gathered parameters go: plain autograd and ``torch.func``, whose gathers take the mean.

    A node that may take the mean has attributes for it, which :func:`prepare` sets: ``sink``, ``averages`` (whether
    there is a mean to take) and ``mean_is_transpose`` (whether taking it is the transpose of the node's forward).
    """

    anchors: list[Tensor] | None = None  # outputs to differentiate along with the result, see Note [Unused units]
    averages = True  # whether nodes take the mean
    nothing = 0.0  # what a rank adds to a sum where its value depends on nothing: Note [Unused units]
    is_open = False  # whether the function that fs.grad differentiates is running

    def start(self, node: Any, grads: Sequence[Tensor]) -> tuple[bool, Sequence[Tensor]]:
        """Return whether ``node`` takes the mean of ``grads``, and ``grads``; raise if a node behind it would too."""
        if not self.averages:
            return False, grads
        if has_mean_behind(*nodes_behind(node)):
            raise RuntimeError(_TWICE)
        if torch.is_grad_enabled() and current_level() == 0 and not node.mean_is_transpose:
            return True, _Differentiated.apply(*grads)
        return True, grads

    def watch(self, key: str, parts: Mapping[str, Tensor]) -> None:
        """Have writes into parameters that were gathered outside of ``spmd`` refused at the end of ``fs.grad``."""

    def finish(self, node: Any, totals: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients that autograd hands on, of ``totals`` that reductions made."""
        return totals


_AUTOGRAD = Sink()
_SINKS: ContextVar[Mapping[int, Sink]] = ContextVar("sinks by level", default={})  # noqa: B039


def current_level() -> int:
    """The current level of ``torch.func``, from 1; 0 is plain autograd.

    In ``setup_context`` of a Function it is the level whose derivative is being set up.
    """
    stack = in_transform()
    return stack[-1].level() if stack else 0


def sink_here() -> Sink:
    """The sink of the level that a ``setup_context`` is called for."""
    sink = _SINKS.get().get(current_level())
    return sink if sink is not None and sink.is_open else _AUTOGRAD


@contextmanager
def gradients_to(sink: Sink = _AUTOGRAD) -> Iterator[None]:
    """A context in which ``sink`` is that of the current level."""
    token = _SINKS.set({**_SINKS.get(), current_level(): sink})
    try:
        yield
    finally:
        _SINKS.reset(token)


def inside() -> bool:
    """Whether a function that ``fs.grad`` differentiates is running: the context of a node may have others too."""
    sinks = _SINKS.get()
    return bool(sinks) and any(sink.is_open for sink in sinks.values())


class Boundary(Sink):
    """One call of ``fs.grad``. While its function runs, a derivative at its level belongs to an inner program.

    ``inputs`` are the leaves to differentiate with respect to, if the caller adds :attr:`totals` to their gradients.
    """

    def __init__(self, inputs: Sequence[Tensor] = ()) -> None:
        self.anchors: list[Tensor] | None = []
        self.is_open = True
        self.totals: dict[int, Tensor] = {}  # terms of gradients of inputs by position, in memory that is this one's
        self.averaged: set[int] = set()  # inputs by position whose gradients are means already: Note [Overlapped means]
        self.gathered: Gathered | None = None  # whole buffers outside of spmd, not to be written to
        self._positions = {id(x): i for i, x in enumerate(inputs)}

    def finish(self, node: Any, totals: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Add ``totals`` to the gradients of inputs, and return those that belong to other tensors.

        What is added does not pass through autograd, which may hand one tensor to several inputs.
        """
        if self.averages:
            return totals
        return [None if x is None else self._take(x, edge) for x, edge in zip(totals, nodes_behind(node), strict=True)]

    def _take(self, total: Tensor, edge: Any) -> Tensor | None:
        leaf = getattr(edge, "variable", None)
        i = self._positions.get(id(leaf))
        if i is None or leaf is None or hooks_of(leaf):
            return total
        self.totals[i] = _plus(total, self.totals.get(i))
        return None

    def total(self, i: int, x: Tensor, grad: Tensor | None) -> Tensor:
        """The gradient with respect to ``x``, input ``i``, from ``grad`` and the reductions, which are overwritten."""
        if i in self.totals:
            return _plus(self.totals[i], grad)
        return torch.full_like(x, self.nothing) if grad is None else grad

    def watch(self, key: str, parts: Mapping[str, Tensor]) -> None:
        """Have writes into the parameters of a buffer refused at the end of the function."""
        self.gathered = self.gathered or Gathered("grad")
        self.gathered.add(key, parts)

    def take_anchors(self) -> list[Tensor]:
        """Return the anchors, and drop them: their nodes know this boundary."""
        anchors, self.anchors = self.anchors, []
        return anchors or []


def _plus(total: Tensor, other: Tensor | None) -> Tensor:
    """The sum of both, written to ``total`` if that has its dtype."""
    if other is None:
        return total
    return total.add_(other) if torch.promote_types(total.dtype, other.dtype) == total.dtype else total + other


@contextmanager
def new_boundary(inputs: Sequence[Tensor] = ()) -> Iterator[Boundary]:
    """A boundary at the current level, around the function that is differentiated."""
    boundary = Boundary(inputs)
    try:
        with gradients_to(boundary):
            yield boundary
        if boundary.gathered:
            boundary.gathered.check()
    except BaseException:
        boundary.take_anchors()
        raise
    finally:
        boundary.is_open = boundary.averages = False


def prepare(ctx: Any, averages: bool, mean_is_transpose: bool) -> None:
    """Set what :class:`Sink` asks of a node, in its ``setup_context``."""
    ctx.sink, ctx.averages, ctx.mean_is_transpose = sink_here(), averages, mean_is_transpose


def has_mean_behind(*edges: Any) -> bool:
    """Whether the backward pass that is running takes a mean at one of the nodes ``edges``, or behind them."""
    return any(getattr(node, "averages", False) and backward_comes_to(node) for node in nodes(*edges))


class _Differentiated(Function):
    """Gradients of which a mean is taken, in a graph: it is differentiated by parameters, and by nothing else.

    ``torch.autograd.functional.jvp`` and ``hvp`` differentiate a gradient by the gradient that it was computed from,
    and take the result for forward mode. That is right for a transpose, which a mean is not.
    """

    @staticmethod
    def forward(*grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not has_mean_behind(*nodes_behind(ctx)):
            raise RuntimeError(_NOT_THE_TRANSPOSE)
        return grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in tangents)


def refuse_derivatives(verb: str, tensors: Iterable[Tensor] = ()) -> None:
    """Raise inside a transform, or if ``fs.grad`` differentiates by ``tensors``: what ``verb`` returns has no graph."""
    if in_transform():
        raise RuntimeError(CALLED_INSIDE.format(verb))
    if inside() and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{verb}: called inside fs.grad, of parameters that it differentiates by. What {verb} returns has no "
            "derivative. Call it outside, between steps, or pass detached shards."
        )


def without_derivative(message: str, results: Mapping[str, Tensor], sources: Iterable[Tensor]) -> dict[str, Tensor]:
    """``results`` of ``sources``: a derivative by these, which would be zero, raises ``message``."""
    tracked = [x for x in sources if x.requires_grad or is_functorch_wrapped_tensor(x)]
    if not tracked or not results:
        return dict(results)
    return dict(zip(results, _Refused.apply(message, len(results), *results.values(), *tracked), strict=True))


class _Refused(Function):
    """The identity of the first tensors, as functions of the others too."""

    @staticmethod
    def forward(message: str, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:number])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(ctx.message)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(ctx.message)

    @staticmethod
    def vmap(info: Any, in_dims: Any, message: str, number: int, *tensors: Tensor) -> Any:
        return _Refused.apply(message, number, *tensors), in_dims[2 : 2 + number]


CALLED_INSIDE = (
    "{}: called inside mesh.spmd, a torch.func transform or torch.compile, where a tree is one rank's or one row's. "
    "Call it outside, between steps: on simulated ranks with the stacked tree."
)
_TWICE = (
    "gather: this derivative goes through a gather of values that were computed from another gather, as in a gradient "
    "through a training step. torch.func.grad and backward() would take the mean over ranks at each of them. Let the "
    "outermost reverse-mode derivative be fs.grad (or fs.grad_and_value), which takes it once; inside, either will do."
)
_NOT_THE_TRANSPOSE = (
    "gather: a gradient is differentiated, and not by parameters, as in torch.autograd.functional.jvp and hvp, which "
    "take backward for the transpose of forward. It is the mean (or the sum) over ranks, and the result would be off "
    "by a factor. Use forward mode: torch.func.jvp(loss, (params,), (v,)), and for the product of the Hessian with v "
    "torch.func.jvp(fs.grad(loss), (params,), (v,))."
)
