"""The transform matrix: some rows by default, more by ``-m slow``, all by ``python -m tests.benchmarks.transforms``."""

from __future__ import annotations

import pytest

from tests.benchmarks.transforms import sign
from tests.laws import nestings_fsdp2
from tests.laws.nestings import COLUMNS, INNER, OUTER, ROWS, UNSHARDED, Row, verdicts
from tests.support.pages import ROOT

# torch.func.linearize traces what it differentiates, which torch does not do inside of vmap, and so on simulated ranks.
TRACED = "linearize"
DEFAULT = ["simulated, 2 axes", "gloo, 1 axis, lazy", "one after the other, 1 axis"]
every_column = pytest.mark.parametrize(
    "column", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in COLUMNS]
)


def rows_of(column: str, columns: list[str]) -> list[Row]:
    """A share of the rows, with every outer and every inner transform; ``columns`` together have all rows."""
    place, number = columns.index(column), len(columns)
    return [row for i, row in enumerate(ROWS) if (i + i // len(INNER)) % number == place]


def alike(column: str) -> list[str]:
    """The columns that share the rows: gloo ranks have 1 axis or 2, lazy or plain gathers, with remat or without."""
    kind, remat = column.split(",")[0], "remat" in column
    sequential = kind == "one after the other"  # four of these share them, the others of one kind two or four
    return [name for name in COLUMNS if name.startswith(kind) and (sequential or ("remat" in name) == remat)]


def refused_on_simulated_ranks(column: str, row: Row) -> bool:
    """``linearize`` traces: torch's vmap has no rule for it, and ranks that take turns wait inside of it."""
    return column.startswith(("simulated", "one after")) and TRACED in row


@every_column
def test_every_nesting_of_two_transforms_is_that_of_the_unsharded_model(column: str) -> None:
    rows = rows_of(column, alike(column))
    assert_right(column, dict(zip(rows, verdicts(COLUMNS[column], rows), strict=True)))


def assert_right(column: str, found: dict[Row, str]) -> None:
    """All of them, but where torch itself cannot trace, or ranks cannot be traced."""
    odd = {row: text for row, text in found.items() if text != "right" and not (text == UNSHARDED and TRACED in row)}
    assert {row: text for row, text in odd.items() if not refused_on_simulated_ranks(column, row)} == {}
    assert "wrong" not in odd.values()


def test_the_page_has_every_row_and_nothing_wrong_of_this_library() -> None:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page_table()]
    header, _, *body = lines
    assert header == ["", *INNER]
    assert [outer for outer, *_ in body] == list(OUTER)
    ours = {(outer, inner): cell.split()[0] for outer, *cells in body for inner, cell in zip(INNER, cells, strict=True)}
    assert {row for row, sign in ours.items() if sign != "✔" and TRACED not in row} == set()


@pytest.mark.slow
def test_the_page_has_what_fsdp2_does() -> None:
    found = dict(zip(ROWS, nestings_fsdp2.verdicts(ROWS), strict=True))
    of_page = [cell.split()[-1] for line in page_table()[2:] for cell in line.split("|")[2:-1]]
    assert of_page == [sign(found[row]) for row in ROWS]


def page_table() -> list[str]:
    return [line for line in (ROOT / "docs/transforms.md").read_text().splitlines() if line.startswith("|")]
