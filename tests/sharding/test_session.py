"""What is whole at a moment and what is fetched ahead: two large units, in the order of use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import functorch_shard as fs
from functorch_shard.sharding import session
from functorch_shard.sharding.reduction import Part
from functorch_shard.sharding.session import NO_PASS, Session, expected_order, small_units

passes = st.sampled_from([NO_PASS, NO_PASS, 1, 2])


def layout_of(sizes: Iterable[int], **options: Any) -> fs.Layout:
    """A unit of each size, in elements."""
    tensors = {f"u{i}.w": torch.zeros(size) for i, size in enumerate(sizes)}
    return fs.plan(tensors, fs.init_mesh(), units=[[name] for name in tensors], align_bytes=0, **options)


class Units:
    """A session with one ``UnitBuffers`` a unit, and what it gathered so far."""

    def __init__(self, layout: fs.Layout) -> None:
        self.session = Session(layout, {})
        parts = [Part(i, unit.buffers, layout) for i, unit in enumerate(layout.units)]
        self.buffers = [self.session.add(part, [torch.zeros(part.buffers[0].numel)]) for part in parts]

    def whole(self) -> list[int]:
        """Those that are whole or being gathered."""
        return [i for i, one in enumerate(self.buffers) if one.flats is not None or one._works is not None]

    def leave(self, unit: int) -> None:
        self.session.leave(self.buffers[unit].part, 7)

    def use(self, *order: int) -> list[list[int]]:
        """What is whole after each use."""
        return [self._use(unit) for unit in order]

    def _use(self, unit: int) -> list[int]:
        assert self.session.data(self.buffers[unit], 0).numel() == self.buffers[unit].part.buffers[0].numel
        assert self.buffers[unit].flats is not None
        return self.whole()


def in_pass(number: int) -> Any:
    """A context in which backward pass ``number`` runs."""
    return mock.patch.object(session, "backward_pass", return_value=number)


def test_the_first_forward_fetches_the_next_unit_of_the_layout() -> None:
    assert Units(layout_of([7] * 4)).use(0, 1, 2, 3) == [[0, 1], [1, 2], [2, 3], [2, 3]]


def test_a_tied_unit_is_expected_at_the_end_and_of_several_nothing_is_known() -> None:
    layers = [nn.Linear(7, 7) for _ in range(4)]
    model = nn.Sequential(*layers)
    layers[3].weight = layers[0].weight
    assert expected_order(fs.plan(model, fs.init_mesh()), frozenset()) == [0, 1, 2, 3, 0]
    layers[2].weight = layers[1].weight
    assert expected_order(fs.plan(model, fs.init_mesh()), frozenset()) == [0, 1, 2, 3]


def test_backward_follows_the_order_of_use_and_not_of_the_layout() -> None:
    units = Units(layout_of([7] * 4))
    units.use(3, 1, 0, 2)
    with in_pass(1):
        assert units.use(2, 0, 1, 3) == [[0, 2], [0, 1], [0, 1], [1, 3]]


@pytest.mark.parametrize(
    ("sizes", "small"),
    [
        ([7, 7, 7], set()),
        ([64, 8, 64], {1}),
        ([64, 9, 64], set()),
        ([64, 4, 4, 1], {1, 3}),  # 1 + 4 <= 64 / 8 < 1 + 4 + 4
        ([0, 64, 0], {0, 2}),
        ([0], {0}),
        ([], set()),
    ],
    ids=str,
)
def test_small_units_are_an_eighth_of_the_largest_together(sizes: list[int], small: set[int]) -> None:
    assert small_units(layout_of(sizes)) == small


@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 64, 60]), min_size=1, max_size=6),
    uses=st.lists(st.tuples(st.integers(0, 5), passes, st.booleans()), max_size=30),
)
@settings(max_examples=100, deadline=None)
def test_no_order_of_use_makes_more_than_two_large_units_whole(
    sizes: list[int], uses: list[tuple[int, int, bool]]
) -> None:
    units = Units(layout_of(sizes))
    large = {i for i in range(len(sizes)) if i not in small_units(layout_of(sizes))}
    for unit, number, left in uses:
        with in_pass(number):
            (whole,) = units.use(unit % len(sizes))
        assert unit % len(sizes) in whole
        assert len(large.intersection(whole)) <= 2
        if left:
            units.leave(unit % len(sizes))
            assert unit % len(sizes) not in units.whole()
