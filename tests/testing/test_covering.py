"""By default a test runs the fewest cases that have each value of each parameter."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.covering import covering


@pytest.mark.parametrize("sizes", [(3,), (2, 4), (3, 2, 4)])
def test_few_cases_have_every_value_of_every_parameter(sizes: tuple[int, ...]) -> None:
    cases = [frozenset(enumerate(row)) for row in product(*map(range, sizes))]
    chosen = covering(cases)
    assert set().union(*(cases[i] for i in chosen)) == set().union(*cases)
    assert len(chosen) == max(sizes)


@pytest.mark.parametrize("x", [1, 2, 3])
@pytest.mark.parametrize(("y", "z"), [(0, 0), (0, 1)])
def test_this_test_has_each_row_of_one_parametrize_and_each_value_of_another(
    request: pytest.FixtureRequest, x: int, y: int, z: int
) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    assert slow == ((x, z) not in {(1, 0), (2, 1), (3, 0)})
