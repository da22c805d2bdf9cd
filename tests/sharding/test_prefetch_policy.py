"""The prefetch policy alone: orders of use in, units to gather and to free out; no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from functorch_shard.sharding.session import NO_PASS, Decision, UseOrder

some_laws = settings(max_examples=200, deadline=None)
NUM_UNITS = 6
Use = tuple[int, int]  # a unit, and the backward pass that it is used in

units = st.integers(0, NUM_UNITS - 1)
uses = st.lists(st.tuples(units, st.sampled_from([NO_PASS, NO_PASS, 1, 2])), max_size=40)
smalls = st.frozensets(units, max_size=NUM_UNITS)
orders = st.permutations(range(NUM_UNITS))


@dataclass
class Driven:
    """A policy, and what is resident when its decisions are followed."""

    policy: UseOrder
    resident: list[int] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)

    def use(self, unit: int, backward_pass: int = NO_PASS) -> Decision:
        if unit != self.policy.current and unit in self.resident:
            self.resident.append(self.resident.pop(self.resident.index(unit)))
        decision = self.policy.arrive(unit, backward_pass, self.resident)
        self.resident = [other for other in self.resident if other not in decision.evict]
        for other in (unit, *decision.fetch):
            if other not in self.resident:
                self.resident.append(other)
                self.gathered.append(other)
        return decision

    def step(self, order: Sequence[int], backward_pass: int) -> list[int]:
        """The gathers of a forward in ``order`` and a backward that needs all but the first one."""
        self.gathered.clear()
        for unit in order:
            self.use(unit)
        for unit in reversed(order[1:]):
            self.use(unit, backward_pass)
        return list(self.gathered)


def followed(policy: UseOrder, uses: Iterable[Use]) -> list[Decision]:
    driven = Driven(policy)
    return [driven.use(*use) for use in uses]


@given(uses, smalls)
@some_laws
def test_at_most_two_large_units_are_resident_and_the_one_in_use_is(uses: list[Use], small: frozenset[int]) -> None:
    driven = Driven(UseOrder(range(NUM_UNITS), small))
    for unit, backward_pass in uses:
        driven.use(unit, backward_pass)
        assert unit in driven.resident
        assert len(set(driven.resident) - small) <= 2


@given(uses, smalls)
@some_laws
def test_a_small_unit_decides_nothing_and_is_never_evicted(uses: list[Use], small: frozenset[int]) -> None:
    for (unit, _), decision in zip(uses, followed(UseOrder(range(NUM_UNITS), small), uses), strict=True):
        assert not small.intersection(decision.evict)
        assert unit not in small or decision == Decision()


@given(uses, smalls)
@some_laws
def test_the_unit_in_use_is_neither_evicted_nor_gathered_ahead(uses: list[Use], small: frozenset[int]) -> None:
    for (unit, _), decision in zip(uses, followed(UseOrder(range(NUM_UNITS), small), uses), strict=True):
        assert unit not in decision.evict
        assert unit not in decision.fetch
        assert len(set(decision.fetch) - small) <= 1


@given(uses)
@some_laws
def test_nothing_is_evicted_where_units_stay_and_the_guesses_are_the_same(uses: list[Use]) -> None:
    stay = followed(UseOrder(range(NUM_UNITS), keeps=True), uses)
    assert all(decision.evict == () for decision in stay)
    assert [decision.fetch for decision in stay] == [d.fetch for d in followed(UseOrder(range(NUM_UNITS)), uses)]


@given(uses, smalls, st.lists(units, max_size=4, unique=True))
@some_laws
def test_what_is_gathered_next_depends_on_the_order_of_use_and_not_on_what_is_resident(
    uses: list[Use], small: frozenset[int], resident: list[int]
) -> None:
    usual, other = followed(UseOrder(range(NUM_UNITS), small), uses), UseOrder(range(NUM_UNITS), small)
    assert [decision.fetch for decision in usual] == [other.arrive(*use, resident).fetch for use in uses]


@given(orders)
@some_laws
def test_a_step_gathers_each_unit_once_forward_and_all_but_the_last_two_and_the_first_in_backward(
    order: list[int],
) -> None:
    assert Driven(UseOrder(order)).step(order, 1) == [*order, *reversed(order[1:-2])]


@given(orders, st.integers(1, NUM_UNITS - 1))
@some_laws
def test_backward_does_not_go_ahead_into_frozen_units_in_front(order: list[int], frozen: int) -> None:
    policy = UseOrder(range(NUM_UNITS), frozen_in_front=frozen)
    driven = Driven(policy)
    for unit in range(NUM_UNITS):
        driven.use(unit)
    for unit in reversed(range(frozen, NUM_UNITS)):
        assert min(driven.use(unit, 1).fetch, default=frozen) >= frozen


def test_a_forward_that_comes_back_to_a_unit_after_a_backward_never_expects_it_to_follow_itself() -> None:
    uses: list[Use] = [(0, 1), (1, NO_PASS), (0, NO_PASS), (1, 1), (0, NO_PASS), (1, NO_PASS), (0, NO_PASS)]
    assert all(
        unit not in decision.fetch for (unit, _), decision in zip(uses, followed(UseOrder(range(2)), uses), strict=True)
    )
