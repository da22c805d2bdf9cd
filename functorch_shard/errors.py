"""How this library says no: every offender in one error, then what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import zip_longest


def reject(verb: str, problems: Sequence[str], advice: str, kind: type[Exception] = ValueError) -> None:
    """Raise one ``kind`` that lists all ``problems`` and closes with ``advice``; return when there are none."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise kind("\n".join([f"{verb}: {count}", *(f"  {problem}" for problem in problems), advice]))


def name_problems(
    got: Iterable[str], expected: Iterable[str], allowed: Iterable[str] = (), where: str = "the layout"
) -> list[str]:
    """One line for each name of ``expected`` that is missing and each of ``got`` that nobody asked for."""
    got, expected = list(got), list(expected)
    present, wanted = set(got), {*expected, *allowed}
    missing = [f"{name!r}: missing" for name in expected if name not in present]
    return missing + [f"{name!r}: not in {where}{hint(name, expected)}" for name in got if name not in wanted]


def hint(name: str, names: Sequence[str]) -> str:
    """What ``name`` may have been meant to be."""
    close = get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(text: str) -> str:
    """A text of others for a terminal: without what would move its cursor."""
    return text if text.isprintable() else repr(text)


def first_difference(mine: Iterable[str], theirs: Iterable[str]) -> tuple[str, str] | None:
    """The first pair of lines that differ, where one side has ended ``"nothing"``; None when all are equal."""
    pairs = zip_longest(mine, theirs, fillvalue="nothing")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def table(rows: Sequence[Sequence[object]], header: Sequence[str], left: int = 1) -> str:
    """Aligned text: the first ``left`` columns to the left, the rest to the right, integers with commas."""
    cells = [list(header)] + [[f"{c:,}" if isinstance(c, int) else str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = ["<" if i < left else ">" for i in range(len(header))]
    lines = ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def axes_text(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in axes.items())
