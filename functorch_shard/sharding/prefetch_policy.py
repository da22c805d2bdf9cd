"""The prefetch policy: which unit to gather next and which to free, from the order of use alone, without tensors.

Note [Residency]: at most two large units of a ``gather`` are whole: the one in use and the one that is gathered ahead
of it (or, where none follows, the one before it). What is next is guessed: in forward the unit that last followed these
two, the one before and this one, or what the order of the parameters suggests; in backward what came before in forward.
``gathered_units.Session`` asks at each use. A wrong guess costs two gathers, its own and that of the unit it evicted,
so a unit that comes back where nothing predicted it (a head that shares the embedding's unit) has no guess. Decisions
do not depend on a clock, on what has arrived or on what the garbage collector has done: all ranks gather in the same
order, whatever their timing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

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
        frozen_in_front: the units before the first trainable one: backward seldom needs them.
        keeps: whether every unit stays once it is gathered (``reshard_after_forward=False``).
    """

    def __init__(
        self,
        expected: Sequence[int],
        small: Set[int] = frozenset(),
        frozen_in_front: range = range(0),
        keeps: bool = False,
    ) -> None:
        self.current: int | None = None
        self._small, self._keeps = small, keeps
        self._expected = {(a, b): c for a, b, c in zip([None, *expected], expected, expected[1:], strict=False)}
        self._next = dict(reversed([*pairwise(expected)]))  # of its first place
        self._frozen_in_front = frozen_in_front
        self._followers: dict[tuple[int | None, int], int] = {}  # of a unit that came after another one
        self._seen: set[int] = set()
        self._before: int | None = None
        self._last: int | None = None  # in forward
        self._units: list[int] = []  # in forward, for backward
        self._position = 0  # in that list, of the backward pass
        self._backward_pass: int | None = None

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
        ahead = self._forward(unit, with_graph) if backward_pass is None else self._enter(backward_pass, unit)
        return Decision(() if ahead is None else self._up_to(unit, ahead), self._evicted(unit, ahead, resident))

    def _evicted(self, unit: int, ahead: int | None, resident: Iterable[int]) -> tuple[int, ...]:
        """All but ``unit`` and the one ahead; where there is none, the last one that was used or gathered may stay."""
        large = [other for other in resident if other not in self._small and other != unit]
        kept = [ahead] if ahead is not None else large[-1:]
        return () if self._keeps else tuple(other for other in large if other not in kept)

    def _up_to(self, unit: int, ahead: int) -> tuple[int, ...]:
        """The small units on the way, and ``ahead``."""
        return (*(other for other in range(unit + 1, ahead) if other in self._small), ahead)

    def _forward(self, unit: int, with_graph: bool) -> int | None:
        if self._last not in (None, unit):
            self._followers[self._before, self._last] = unit
        self._before, self._last = self._last, unit
        self._units += [unit] if with_graph else []
        is_new = unit not in self._seen
        self._seen.add(unit)
        here = (self._before, unit)
        for known in (self._followers, self._expected):
            if here in known:
                return known[here]
        return self._unseen_after(unit) if is_new else None

    def _unseen_after(self, unit: int) -> int | None:
        follower = self._next.get(unit)
        return None if follower in self._seen else follower

    def _enter(self, backward_pass: int, unit: int) -> int | None:
        if backward_pass != self._backward_pass:
            self._backward_pass, self._position = backward_pass, len(self._units) - 1
            self._before = self._last = None
        return self._backward(unit)

    def _backward(self, unit: int) -> int | None:
        """From where it was used nearest to here, on in the same direction; at the turn, back."""
        for distance in range(len(self._units)):
            for step in (-1, 1):
                i = self._position + step * distance
                if 0 <= i < len(self._units) and self._units[i] == unit:
                    self._position = i
                    return self._ahead(i + step, unit)
        return None

    def _ahead(self, i: int, unit: int) -> int | None:
        """The unit at ``i``, but not the first one: nothing was computed before it, so its data is seldom needed.

        Nor the frozen ones in front: backward does not come there, unless the input's gradient is wanted.
        """
        return self._units[i] if self._first() <= i < len(self._units) and self._units[i] != unit else None

    def _first(self) -> int:
        return max(next((i for i, unit in enumerate(self._units) if unit not in self._frozen_in_front), 0), 1)


def use_order(layout: Layout) -> UseOrder:
    """The policy of a ``gather`` with ``layout``, before anything was used."""
    small = small_units(layout)
    return UseOrder(expected_order(layout, small), small, _in_front(layout), keeps=not layout.reshard_after_forward)


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


def _in_front(layout: Layout) -> range:
    """The units before the first one that is trainable."""
    trainable = (i for i, unit in enumerate(layout.units) if any(buffer.trainable for buffer in unit.buffers))
    return range(next(trainable, 0))
