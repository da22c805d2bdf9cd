"""A looped test is run with each value, and an error names the value."""

from __future__ import annotations

import pytest

from tests.support.looped import looped

seen: list[tuple[str, int]] = []


@pytest.mark.parametrize("letter", ["a", "b"])
@looped("number", [1, 2])
def test_a_looped_test_has_every_value_beside_each_of_its_parameters(letter: str, number: int) -> None:
    seen.append((letter, number))
    assert seen[-2 if number == 2 else -1 :] == [(letter, i + 1) for i in range(number)]


@looped("number", [1, 2])
def fails(number: int) -> None:
    assert number == 1, "not one"


def test_an_error_names_the_value() -> None:
    with pytest.raises(AssertionError, match="number=2: not one"):
        fails()
