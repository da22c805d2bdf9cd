"""Each value instead of all products: by default a test runs the fewest cases that have each value of each parameter.

A test of three models, two dtypes and four kinds of ranks has 24 cases. Four of them have every model, every dtype and
every kind of ranks, and run at each commit. The others are marked ``slow``; ``-m slow`` runs them every night.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

Values = frozenset[Hashable]


def covering(cases: Sequence[Values]) -> set[int]:
    """Return the indices of few cases that together have all values.

    Greedily: the case with the most new values, and of several the one whose other values were used least.
    """
    chosen: set[int] = set()
    missing, uses = set().union(*cases), Counter[Any]()

    def worth(i: int) -> tuple[int, int]:
        return len(cases[i] & missing), -sum(uses[value] for value in cases[i])

    while missing:
        best = max(range(len(cases)), key=worth)
        chosen.add(best)
        uses.update(cases[best])
        missing -= cases[best]
    return chosen


def mark_other_cases_slow(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the cases of each test whose values other cases of the same test have."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        chosen = covering([_values(item) for item in cases])
        for i, item in enumerate(cases):
            if i not in chosen:
                item.add_marker(pytest.mark.slow)


def _values(item: Any) -> Values:
    """One value of each ``parametrize``: rows of several arguments stay rows."""
    return frozenset(enumerate(item.callspec._idlist))
