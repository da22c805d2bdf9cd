"""The prefetch policy: which unit to gather next and which to free, from the order of use alone, without tensors.

Note [Residency]: at most two large units of a ``gather`` are whole: the one in use and the one that is gathered ahead
of it, or where none follows the one before it. What is next is guessed: in forward the unit that last followed these
two, the one before and this one; at first by the order of the parameters. In backward what came before in forward. A
wrong guess costs two gathers, its own and that of the unit it evicted, so where nothing is known there is no guess.
Decisions do not depend on a clock, on what has arrived or on what the garbage collector has done: all ranks gather in
the same order, whatever their timing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, groupby

from ..layout.layout import Layout

# Units so small that all of them together are no more than this part of the largest one (norms, scalars, position
# tables) stay once they are gathered: a gather costs a round of messages however little it moves, and a unit of a
# scalar that every block uses would evict the block at each use.
SMALL_PART = 1 / 8


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do when a unit is used: units to free at once, and units to gather after it, in this order."""

    fetch: tuple[int, ...] = ()
    evict: tuple[int, ...] = ()


class UseOrder:
    """The order in which the units of one ``gather`` were used, and the decisions that follow from it.

    Args:
        expected: the large units in the order that they will probably be used in; see :func:`expected_order`.
        small: the units that stay once they are gathered.
        frozen_in_front: the number of units before the first trainable one, which backward seldom needs.
        keeps: whether every unit stays once it is gathered (``reshard_after_forward=False``).
    """

    def __init__(
        self,
        expected: Sequence[int],
        small: Set[int] = frozenset(),
        frozen_in_front: int = 0,
        keeps: bool = False,
    ) -> None:
        self.current: int | None = None
        self._small, self._keeps, self._frozen_in_front = small, keeps, frozen_in_front
        self._next: dict[tuple[int | None, int], int] = {}  # of a unit that came after another one
        self._next.update(zip(zip([None, *expected], expected, strict=False), expected[1:], strict=False))
        self._last: tuple[int | None, int | None] = None, None  # the last two in forward
        self._used: list[int] = []  # in forward, for backward
        self._backward_pass: int | None = None
        self._position = 0  # in that list, of the backward pass
        self._end = 0  # where in that list backward ends

    def arrive(
        self, unit: int, backward_pass: int | None, resident: Iterable[int], with_graph: bool = True
    ) -> Decision:
        """The decision when ``unit`` is used.

        Args:
            unit: the unit whose data is needed now.
            backward_pass: the number of the backward pass that runs, ``None`` in forward.
            resident: the units that are whole or being gathered, from the least to the most recently used.
            with_graph: whether a backward pass may follow this forward.
        """
        if unit == self.current or unit in self._small:
            return Decision()
        self.current = unit
        ahead = self._forward(unit, with_graph) if backward_pass is None else self._backward(unit, backward_pass)
        large = [other for other in resident if other not in self._small and other != unit]
        kept = large[-1:] if ahead is None else [ahead]  # where none follows, the last one may stay
        evict = () if self._keeps else tuple([other for other in large if other not in kept])
        if ahead is None:
            return Decision(evict=evict)
        on_the_way = [other for other in range(unit + 1, ahead) if other in self._small] if self._small else ()
        return Decision((*on_the_way, ahead), evict)

    def _forward(self, unit: int, with_graph: bool) -> int | None:
        before, last = self._last
        if last is not None and last != unit:
            self._next[before, last] = unit
        self._last = last, unit
        self._used += [unit] if with_graph else []
        return self._next.get(self._last)

    def _backward(self, unit: int, backward_pass: int) -> int | None:
        """From where it was used nearest to here, on in the same direction; at the turn, back."""
        if backward_pass != self._backward_pass:
            self._backward_pass, self._position, self._last = backward_pass, len(self._used) - 1, (None, None)
            needed = [i for i, other in enumerate(self._used) if other >= self._frozen_in_front]
            self._end = max(needed[0] if needed else 0, 1)  # nothing was computed before the first one
        places = [(abs(i - self._position), i) for i, other in enumerate(self._used) if other == unit]
        if not places:
            return None
        _, i = min(places)
        ahead = i + (1 if i > self._position else -1)
        self._position = i
        return self._used[ahead] if self._end <= ahead < len(self._used) and self._used[ahead] != unit else None


def use_order(layout: Layout) -> UseOrder:
    """The policy of a ``gather`` with ``layout``, before anything was used."""
    if UseOrder not in layout.derived:
        small = small_units(layout)
        trainable = (i for i, unit in enumerate(layout.units) if any(buffer.trainable for buffer in unit.buffers))
        layout.derived.update({UseOrder: (expected_order(layout, small), small, next(trainable, 0))})
    return UseOrder(*layout.derived[UseOrder], keeps=not layout.reshard_after_forward)


def small_units(layout: Layout) -> frozenset[int]:
    """The units that stay whole once they are gathered: together at most ``SMALL_PART`` of the largest one."""
    sizes = sorted((sum(buffer.nbytes for buffer in unit.buffers), i) for i, unit in enumerate(layout.units))
    limit = SMALL_PART * sizes[-1][0] if sizes else 0
    sums = accumulate(size for size, _ in sizes)
    return frozenset(i for (_, i), total in zip(sizes, sums, strict=True) if total <= limit)


def expected_order(layout: Layout, small: Set[int]) -> list[int]:
    """The large units in the order that a model uses them in, as far as the order of its parameters suggests.

    A unit with parameters before and after those of others (embedding and head of one unit) comes more than once; so
    does a unit that is tied, if it is the only one.
    """
    unit_of = {slot.name: i for i, unit in enumerate(layout.units) for buffer in unit.buffers for slot in buffer.slots}
    in_source = [unit_of[name] for name in layout.slots if unit_of[name] not in small]
    tied = {unit_of[name] for _, name in layout.aliases} - small
    return [unit for unit, _ in groupby([*in_source, *(tied if len(tied) == 1 else ())])]
