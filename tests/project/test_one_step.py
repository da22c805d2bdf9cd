"""docs/explanation/one_step.md follows a step through the core: its stations are where it says."""

from __future__ import annotations

import re
from pathlib import Path

import functorch_shard as fs
from tests.support.pages import ROOT

PACKAGE = Path(fs.__file__).parent
ROWS = re.findall(
    r"^\| (\d+) \| `([\w/]+\.py)` `(\w+)` \|", (ROOT / "docs/explanation/one_step.md").read_text(), re.MULTILINE
)


def test_every_station_is_a_function_or_a_class_of_the_file() -> None:
    assert [number for number, _, _ in ROWS] == [str(i + 1) for i in range(len(ROWS))]
    wrong = [
        (path, name)
        for _, path, name in ROWS
        if not re.search(rf"^(def|class) {name}\b", (PACKAGE / path).read_text(), re.MULTILINE)
    ]
    assert wrong == []


def test_a_step_has_fifteen_stations_at_most() -> None:
    assert 10 <= len(ROWS) <= 15
