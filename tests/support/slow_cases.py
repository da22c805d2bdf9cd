"""Cases that take long, of tests with others: ``tests/slow_cases.txt`` names them, and ``-m slow`` runs them.

A few hundred cases of tests that have several take most of the time of all. A case stays out of the default run if it
takes ``LONG`` seconds or more, and each of its parameters is in another case of the same test. Of numbers of ranks one
of several stands for the others of its kind. Torch's ``slow_tests.json`` is the same idea.

To measure anew, empty the list, and with nothing else running:

    python -m pytest -n auto --dist loadfile --durations=0 > times.log
    python -m tests.support.slow_cases times.log > tests/slow_cases.txt
"""

from __future__ import annotations

import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import pytest

LONG = 0.15  # seconds
LIST = Path(__file__).parent.parent / "slow_cases.txt"
STALE = pytest.StashKey[list[str]]()  # of the configuration of pytest: listed names that no collected test has
_RANKS = re.compile(r"(?:shard|replicate|dp|cp)'?[=:] ?(\d+)")
_LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown) +(tests/\S+::.*)")


def listed() -> frozenset[str]:
    """The node ids of the list."""
    return frozenset(LIST.read_text().splitlines())


def unknown(names: Iterable[str], collected: Iterable[str]) -> list[str]:
    """Of listed ``names`` in files of which all tests were ``collected``, those that no test has."""
    collected = {*collected}
    files = {name.split("::")[0] for name in collected}
    return sorted(name for name in names if name not in collected and name.split("::")[0] in files)


def part(text: str) -> tuple[int, int]:
    """``"2/3"``, the second of three, as numbers."""
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(text)
    return number, parts


def in_part(name: str, number: int, parts: int) -> bool:
    """Whether a test is in a part: by its name, so that parts are about equal and have cases of every file."""
    return zlib.crc32(name.encode()) % parts == number - 1


def durations(lines: Iterable[str]) -> dict[str, float]:
    """Seconds of each case, of its setup and teardown too, from what ``--durations=0`` prints."""
    seconds: dict[str, float] = defaultdict(float)
    for match in filter(None, map(_LINE.match, lines)):
        seconds[match[2]] += float(match[1])
    return dict(seconds)


def long_cases(seconds: Mapping[str, float]) -> list[str]:
    """The cases that other cases of the same test stand for."""
    tests: dict[str, list[str]] = defaultdict(list)
    for name in seconds:
        tests[name.split("[")[0]].append(name)
    return sorted(name for cases in tests.values() for name in _long_of(cases, seconds))


def _long_of(cases: list[str], seconds: Mapping[str, float]) -> Iterator[str]:
    shown: set[str] = set()
    for name in sorted(cases, key=lambda name: (seconds[name], name)):
        parameters = _parameters(name)
        if seconds[name] >= LONG and parameters <= shown:
            yield name
        shown |= parameters


def _parameters(name: str) -> set[str]:
    """What the id of a case says, with the kind of its ranks, and whether there are several, for their number."""
    words = name.partition("[")[2].removesuffix("]").split("-")
    return {_kind(word) if _RANKS.search(word) else word for word in words}


def _kind(ranks: str) -> str:
    kind = next((kind for kind in ("gloo", "sequential") if kind in ranks), "batched")
    return f"{kind} ranks" if prod(map(int, _RANKS.findall(ranks))) > 1 else f"one of {kind}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}\n" for name in long_cases(durations(Path(sys.argv[1]).read_text().splitlines())))
