"""What a rank did not use counts as zeros in its gradients, so that all ranks reduce alike.

Note [Unused units]: a reduction is made when backward comes to it, and on a rank whose loss does not depend on a unit
it never does, while the others wait for its addend. So inside of ``fs.grad`` all ranks owe each other one reduction for
each part that they gathered, used or not: those are the same on all of them, or the gathers would have been refused
(Note [Envelopes]). They are made in one order, the last gathered first, which is that of backward: before a part's
own reduction come, as zeros, those before it to which the pass does not come here, and at the end the others. That end
is a node in front of everything, which the backward pass always comes to: ``fs.grad`` differentiates its *anchor*, an
output that nobody uses, along with the loss.

Anywhere else (``backward()``, a reentrant checkpoint) nobody knows which pass is the last one, and nothing is added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import takewhile
from typing import Any
from weakref import ref

from ..torch_internals.autograd import backward_comes_to


class Owed:
    """The reductions that every rank makes in a backward pass over one ``gather``, by the part they are of."""

    def __init__(self) -> None:
        self._nodes: dict[Hashable, ref[Any]] = {}  # weak: they know the session
        self._gathered: dict[Hashable, None] = {}  # in this order on all ranks
        self._open: dict[int, OrderedDict[Hashable, None]] = {}  # what a backward pass has not reduced yet

    def expect(self, part: Hashable, node: Any) -> None:
        """Backward reduces ``part`` when it comes to ``node``."""
        self._nodes[part] = ref(node)

    def gather(self, part: Hashable) -> None:
        """All ranks gather ``part``."""
        self._gathered.setdefault(part)

    def before(self, part: Hashable, backward_pass: int) -> list[Any]:
        """``part`` is reduced now; the parts to reduce before it, as zeros."""
        left = self._left(backward_pass)
        if part not in left:
            return []
        earlier = takewhile(lambda other: other != part, left)
        unused = [other for other in earlier if not self._is_to_come(other)]
        for other in (*unused, part):
            del left[other]
        return unused

    def rest(self, backward_pass: int) -> list[Any]:
        """The parts that ``backward_pass``, which is over, has not reduced."""
        left = self._left(backward_pass)
        del self._open[backward_pass]
        return [*left]

    def _left(self, backward_pass: int) -> OrderedDict[Hashable, None]:
        """From the last that was gathered to the first."""
        if backward_pass not in self._open:
            expected = (part for part in reversed(self._gathered) if part in self._nodes)
            self._open[backward_pass] = OrderedDict.fromkeys(expected)
        return self._open[backward_pass]

    def _is_to_come(self, part: Hashable) -> bool:
        node = self._nodes[part]()
        return node is not None and backward_comes_to(node)
