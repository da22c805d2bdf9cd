"""Every transform of a sharded loss under every other one, on every kind of ranks, beside FSDP2 run live.

``python -m tests.benchmarks.transforms`` compares each row with the unsharded model in float64 and prints a table;
``--columns`` chooses kinds of ranks by a part of their names, ``--markdown`` prints the table of docs/transforms.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.benchmarks.tools import command_line
from tests.laws import nestings_fsdp2
from tests.laws.nestings import COLUMNS, INNER, OUTER, ROWS, UNSHARDED, Row, verdicts

FSDP2 = "FSDP2, gloo, 1 axis"
Verdicts = Mapping[str, Mapping[Row, str]]  # by column and row


def sign(verdict: str) -> str:
    return {"right": "✔", "wrong": "✘", UNSHARDED: "-"}.get(verdict, "!")


def table(found: Verdicts) -> str:
    """A line for each outer transform: in all columns of this library, and of FSDP2; the worst of each."""
    lines = ["| | " + " | ".join(INNER) + " |", "|---" * (len(INNER) + 1) + "|"]
    for outer in OUTER:
        cells = [" ".join(_cell(found, (outer, inner))) for inner in INNER]
        lines.append(f"| {outer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: Verdicts, row: Row) -> list[str]:
    ours = {sign(rows[row]) for name, rows in found.items() if name != FSDP2}
    worst = next(mark for mark in "✘!-✔" if mark in ours)
    mark = worst + "*" * (worst == "!" and "✔" in ours)
    return [mark, sign(found[FSDP2][row])] if FSDP2 in found else [mark]


def summary(found: Verdicts) -> str:
    lines = []
    for name, rows in found.items():
        count = Counter(sign(verdict) for verdict in rows.values())
        parts = [f"{count[mark]} {text}" for mark, text in MEANING.items() if count[mark]]
        lines.append(f"{name}: {', '.join(parts)}")
    return "\n".join(lines)


MEANING = {"✔": "right", "✘": "wrong", "!": "raise", "-": "raise for the unsharded model too"}


def main() -> None:
    given = command_line(__doc__, columns=[""], markdown=False)
    found: dict[str, dict[Row, str]] = {}
    for name, column in COLUMNS.items():
        if any(part in name for part in given.columns):
            found[name] = dict(zip(ROWS, verdicts(column, ROWS), strict=True))
    if any(part in FSDP2 for part in given.columns):
        found[FSDP2] = dict(zip(ROWS, nestings_fsdp2.verdicts(ROWS), strict=True))
    print(table(found))
    if not given.markdown:
        print(f"\n{summary(found)}")


if __name__ == "__main__":
    main()
