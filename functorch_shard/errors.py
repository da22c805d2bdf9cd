"""How this library says no: every offender in one error, then what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from heapq import nlargest
from itertools import zip_longest

SHOWN = 20  # offenders that an error lists; the rest is counted
_HINTED = 5  # of those, how many get a guess: each is compared with every name there is
_COMPARED = 50  # names that are compared in earnest, which takes 0.1 ms each


def reject(verb: str, problems: Sequence[str], advice: str, kind: type[Exception] = ValueError) -> None:
    """Raise one ``kind`` that counts all ``problems``, lists the first and ends with ``advice``; return without any."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
        raise kind("\n".join([f"{verb}: {count}", *(f"  {line}" for line in cut(problems)), advice]))


def cut(lines: Sequence[str]) -> list[str]:
    """The first lines, and how many more there are: nobody reads 4,000 of them."""
    rest = len(lines) - SHOWN
    return [*lines] if rest < 2 else [*lines[:SHOWN], f"... and {rest:,} more"]


def listed(names: Iterable[object]) -> str:
    """Names in a sentence, the first of them where there are many."""
    return ", ".join(cut([repr(name) for name in names])) or "none"


def name_problems(
    got: Iterable[str], expected: Iterable[str], allowed: Iterable[str] = (), where: str = "the layout"
) -> list[str]:
    """One line for each name of ``expected`` that is missing and each of ``got`` that nobody asked for.

    Where they are too many to list, the two kinds take turns: a missing name and a wrong one are often the same.
    """
    got, expected = list(got), list(expected)
    present, wanted, guess = set(got), {*expected, *allowed}, hints(expected)
    missing = [f"{name!r}: missing" for name in expected if name not in present]
    odd = [f"{name!r}: not in {where}{guess(name)}" for name in got if name not in wanted]
    if len(missing) + len(odd) <= SHOWN:
        return missing + odd
    return [line for pair in zip_longest(missing, odd) for line in pair if line is not None]


def hints(names: Iterable[str]) -> Callable[[str], str]:
    """A function that says what a name may have been meant to be, for the first few that it is asked about."""
    known, turns = [*names], iter(range(_HINTED))
    return lambda name: hint(name, known) if next(turns, None) is not None else ""


def hint(name: str, names: Sequence[str]) -> str:
    """What ``name`` may have been meant to be: the closest of those that begin and end alike."""
    close = get_close_matches(name, _alike(name, names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _alike(name: str, names: Sequence[str]) -> Sequence[str]:
    """The names that share most with ``name``, from both ends: a letter or a part that is wrong leaves the rest."""
    if len(names) <= _COMPARED:
        return names
    backwards = name[::-1]
    return nlargest(_COMPARED, names, key=lambda x: _common(name, x) + _common(backwards, x[::-1]))


def _common(a: str, b: str) -> int:
    """How many characters two texts have in common before they differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


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
