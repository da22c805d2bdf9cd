"""Collect all problems, raise once, end with a fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import zip_longest

SHOWN = 20  # problems that an error lists; the rest is counted
_HINTED = 5  # names that get a suggestion: each is compared with every known name


def reject(verb: str, problems: Sequence[str], advice: str, kind: type[Exception] = ValueError) -> None:
    """Raise one ``kind`` that counts ``problems``, lists the first ones and ends with ``advice``, if there are any."""
    if problems:
        count, rest = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems", len(problems) - SHOWN
        lines = [*problems] if rest < 2 else [*problems[:SHOWN], f"... and {rest:,} more"]
        raise kind("\n".join([f"{verb}: {count}", *(f"  {line}" for line in lines), advice]))


def name_problems(got: Iterable[str], expected: Iterable[str], allowed: Iterable[str] = ()) -> list[str]:
    """One line for each name of ``expected`` that is missing and each of ``got`` that is not expected.

    If there are too many to list, the two kinds alternate: a missing name and a wrong one often belong together.
    """
    got, expected = list(got), list(expected)
    present, wanted, guess = set(got), {*expected, *allowed}, hints(expected)
    missing = [f"{name!r}: missing" for name in expected if name not in present]
    odd = [f"{name!r}: not in the layout{guess(name)}" for name in got if name not in wanted]
    if len(missing) + len(odd) <= SHOWN:
        return missing + odd
    return [line for pair in zip_longest(missing, odd) for line in pair if line is not None]


def hints(names: Iterable[str]) -> Callable[[str], str]:
    """A function that suggests a similar name, for the first few names that it is called with."""
    known, turns = [*names], iter(range(_HINTED))
    return lambda name: hint(name, known) if next(turns, None) is not None else ""


def hint(name: str, names: Sequence[str]) -> str:
    """A suggestion: the most similar of ``names``."""
    close = get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(text: str) -> str:
    """``text`` for a terminal: quoted if it has control characters."""
    return text if text.isprintable() else repr(text)


def first_difference(mine: Iterable[str], theirs: Iterable[str]) -> tuple[str, str] | None:
    """The first pair of lines that differ, with ``"nothing"`` after the end of one side; None if all are equal."""
    pairs = zip_longest(mine, theirs, fillvalue="nothing")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def table(rows: Sequence[Sequence[object]], header: Sequence[str], left: int = 1) -> str:
    """A text table: the first ``left`` columns left-aligned, the others right-aligned, integers with commas."""
    cells = [list(header)] + [[f"{c:,}" if isinstance(c, int) else str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = ["<" if i < left else ">" for i in range(len(header))]
    lines = ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def axes_text(axes: Mapping[str, int]) -> str:
    """Names and sizes of axes: ``replicate=2 x shard=4``."""
    return " x ".join(f"{name}={size}" for name, size in axes.items())
