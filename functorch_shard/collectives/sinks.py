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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..torch_internals.autograd import Function, backward_comes_to, in_transform, nodes, nodes_behind


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
        """Return whether ``node`` takes the mean of ``grads`` in the backward that is running, and ``grads``.

        Raises:
            RuntimeError: it does, and so would another node that this derivative is about to go through.
        """
        if not self.averages:
            return False, grads
        if any(map(_is_averaged, nodes(*nodes_behind(node)))):
            raise RuntimeError(_TWICE)
        if torch.is_grad_enabled() and current_level() == 0 and not node.mean_is_transpose:
            return True, _Differentiated.apply(*grads)
        return True, grads

    def watch(self, key: str, whole: Tensor, names: Sequence[str]) -> None:
        """Have writes into a whole buffer that was gathered outside of ``spmd`` refused at the end of ``fs.grad``."""

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


def prepare(ctx: Any, averages: bool, mean_is_transpose: bool) -> None:
    """Set what :class:`Sink` asks of a node, in its ``setup_context``."""
    ctx.sink, ctx.averages, ctx.mean_is_transpose = sink_here(), averages, mean_is_transpose


def has_mean_behind(edge: Any) -> bool:
    """Whether the backward pass that is running takes a mean at the node ``edge``, or behind it."""
    return any(map(_is_averaged, nodes(edge)))


def _is_averaged(node: Any) -> bool:
    return getattr(node, "averages", False) and backward_comes_to(node)


class _Differentiated(Function):
    """Gradients of which a mean is taken, in a graph: it is differentiated by parameters, and by nothing else.

    ``torch.autograd.functional.jvp`` and ``hvp`` differentiate a gradient by the gradient that it was computed from,
    and take the result for forward mode. That is right for a transpose, which a mean is not.
    """

    @staticmethod
    def forward(*grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not any(map(_is_averaged, nodes(*nodes_behind(ctx)))):
            raise RuntimeError(_NOT_THE_TRANSPOSE)
        return grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in tangents)


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
