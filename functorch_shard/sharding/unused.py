"""Units that a rank did not use count as zeros in its gradients, so that all ranks issue the same reductions.

Note [Unused units]: backward starts the reduction of a unit when it reaches the unit's node. On a rank whose loss does
not depend on the unit it never does, while the other ranks wait for its addend. So inside of ``fs.grad`` every rank
makes one reduction for each part that it gathered, used or not; what was gathered is the same on all ranks, or the
gathers would have been refused (Note [Envelopes]). The order is the same too, the last gathered first, as in backward:
before the reduction of a part, those before it whose nodes this pass does not reach are made with zeros, and at the end
the rest. That end is the backward of a node in front of all shards. The pass always reaches it, because ``fs.grad``
differentiates its *anchor*, an output without a use, along with the loss.

What no rank used is refused, by all ranks or by none. A rank whose loss uses no part adds -0.0, the identity of
addition (0.0 is not: -0.0 + 0.0 = 0.0), so a sum is -0.0 where no rank had anything to add.

Elsewhere (``backward()``, a reentrant checkpoint) it is not known which pass is the last one, and nothing is added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import takewhile
from typing import Any
from weakref import ref

from ..torch_internals.autograd import backward_comes_to


class Owed:
    """The reductions that every rank has to make in a backward pass over one ``gather``, by part."""

    def __init__(self) -> None:
        self._nodes: dict[Hashable, ref[Any]] = {}  # weak: they know the session
        self._gathered: dict[Hashable, None] = {}  # in this order on all ranks
        self._open: dict[int, OrderedDict[Hashable, None]] = {}  # what a backward pass did not reduce yet

    def expect(self, part: Hashable, node: Any) -> None:
        """Backward reduces ``part`` when it reaches ``node``."""
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
        """The parts that ``backward_pass``, which is over, did not reduce."""
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
