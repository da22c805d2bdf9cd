"""What the default run leaves out is shown by what it has."""

from __future__ import annotations

import pytest

from tests.support import slow_cases
from tests.support.slow_cases import durations, in_part, long_cases, unknown

LONG = slow_cases.LONG
SECONDS = {
    "tests/a.py::test_one[x-gloo shard=2]": 2 * LONG,
    "tests/a.py::test_one[x-gloo shard=3]": 3 * LONG,
    "tests/a.py::test_one[y-gloo replicate=2,shard=2]": 4 * LONG,
    "tests/a.py::test_one[y-gloo shard=2]": 5 * LONG,
    "tests/a.py::test_one[x-shard=1]": 0.0,
    "tests/a.py::test_one[x-shard=3]": LONG,
    "tests/a.py::test_two[gloo shard=2]": 9 * LONG,
    "tests/a.py::test_three": 9 * LONG,
}


def test_each_parameter_and_each_kind_of_several_ranks_stays_in_the_default_run() -> None:
    assert long_cases(SECONDS) == ["tests/a.py::test_one[x-gloo shard=3]", "tests/a.py::test_one[y-gloo shard=2]"]


def test_seconds_are_those_of_setup_call_and_teardown() -> None:
    lines = ["== slowest durations ==", "0.50s setup    tests/a.py::test[x y]", "0.25s call     tests/a.py::test[x y]"]
    assert durations(lines) == {"tests/a.py::test[x y]": 0.75}


def test_a_listed_name_that_no_test_has_is_reported_if_its_file_was_collected() -> None:
    assert unknown(["a.py::old", "a.py::new", "b.py::other"], ["a.py::new", "a.py::more"]) == ["a.py::old"]


def test_every_listed_name_is_that_of_a_test(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.stash[slow_cases.STALE] == [], "drop these from tests/slow_cases.txt, or rename them"


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_are_the_whole_and_have_nothing_in_common(parts: int) -> None:
    names = [f"tests/a.py::test[{i}]" for i in range(100)]
    split = [{name for name in names if in_part(name, number + 1, parts)} for number in range(parts)]
    assert sum(map(len, split)) == len(names)
    assert set().union(*split) == {*names}
    assert all(split)


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "1/x"])
def test_no_other_text_is_a_part(text: str) -> None:
    with pytest.raises(ValueError):
        slow_cases.part(text)
