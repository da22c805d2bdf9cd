"""docs/referees.md has a line for every program of tests/referees, and says how each is refused."""

from __future__ import annotations

from pathlib import Path

from tests.referees.table import HEADER, referees

TEXT = (Path(__file__).parents[2] / "docs" / "referees.md").read_text()
LINES = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]


def test_the_page_has_a_line_for_every_program_in_order() -> None:
    assert TEXT.count("| " + " | ".join(HEADER) + " |") == 1
    assert [line[0] for line in LINES[1:]] == [str(referee) for referee in referees()]


def test_the_page_says_how_a_program_is_refused() -> None:
    words = {str(referee): [referee.batched, referee.refused, referee.gloo] for referee in referees()}
    for line in LINES[1:]:
        assert [word for word in words[line[0]] if word and word not in line[-1]] == []


def test_the_page_has_no_error_of_another_library() -> None:
    assert "RAISES" not in "\n".join(" ".join(line) for line in LINES)
