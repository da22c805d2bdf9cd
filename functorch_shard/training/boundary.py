"""The boundary of ``fs.grad``: the sink of gradients that takes the mean over ranks at the end, Note [Boundary]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..collectives.sinks import Sink, gradients_to
from ..communication.writes import Gathered
from ..torch_internals.autograd import nodes_behind
from ..torch_internals.tensors import hooks_of


class Boundary(Sink):
    """One call of ``fs.grad``. While its function runs, a derivative at its level belongs to an inner program.

    Args:
        inputs: the leaves to differentiate with respect to, if the caller adds :attr:`totals` to their gradients.
    """

    def __init__(self, inputs: Sequence[Tensor] = ()) -> None:
        self.anchors: list[Tensor] | None = []
        self.is_open = True
        self.totals: dict[int, Tensor] = {}  # terms of gradients of inputs by position, in memory that is this one's
        self.averaged: set[int] = set()  # inputs by position whose gradients are means already: Note [Overlapped means]
        self.gathered = Gathered("grad")
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
        self.totals[i] = plus(total, self.totals.get(i))
        return None

    def watch(self, key: str, whole: Tensor, names: Sequence[str]) -> None:
        """Have writes into a whole buffer refused at the end of the function."""
        self.gathered.add(key, whole, names)

    def take_anchors(self) -> list[Tensor]:
        """Return the anchors, and drop them: their nodes know this boundary."""
        anchors, self.anchors = self.anchors, []
        return anchors or []


def plus(total: Tensor, other: Tensor | None) -> Tensor:
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
        boundary.gathered.check()
    except BaseException:
        boundary.take_anchors()
        raise
    finally:
        boundary.is_open = boundary.averages = False


def allow_wider_gradients(tensors: Sequence[Tensor], wide: Sequence[bool]) -> None:
    """Keep autograd from casting gradients to the stored dtype before they are divided, see Note [Boundary]."""
    for x, is_wide in zip(tensors, wide, strict=True):
        if is_wide:
            x.grad_dtype = None
