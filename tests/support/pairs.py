"""Pairs of values instead of all products: each value of a parameter meets each value of every other one in some case.

A law of three parameters rarely breaks for one triple alone; what two of them do together does. So cases are chosen
such that every two values of two parameters occur in one of them: 18 instead of 36 for 6 ways, 2 policies and 3 kinds
of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from tests.support.covering import covering


def pairwise(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few rows, one value of each of ``values`` in a row, in which every two values of two of them meet.

    >>> pairwise("ab", "xy", [1, 2])
    [('a', 'x', 1), ('a', 'y', 2), ('b', 'x', 2), ('b', 'y', 1)]
    """
    each = [[*one] for one in values]
    every = [*product(*(range(len(one)) for one in each))]
    rows = [every[i] for i in sorted(covering([*map(_pairs, every)]))]
    return [tuple(one[i] for one, i in zip(each, row, strict=True)) for row in rows]


def _pairs(row: Sequence[int]) -> frozenset[tuple[tuple[int, int], ...]]:
    return frozenset(combinations(enumerate(row), min(2, len(row))))


def in_pairs(*, more: list[Any] | None = None, **values: Iterable[Any]) -> pytest.MarkDecorator:
    """``parametrize`` with the rows of :func:`pairwise`, and with those of further kinds of ranks for ``-m slow``."""
    names = [*values]
    rows = [pytest.param(*row, id=_id(row)) for row in pairwise(*values.values())]
    further = pairwise(*{**values, "ranks": more}.values()) if more else []
    rows += [pytest.param(*row, id=_id(row), marks=pytest.mark.slow) for row in further]
    return pytest.mark.parametrize(names if len(names) > 1 else names[0], rows)


def _id(row: Sequence[Any]) -> str:
    return "-".join(getattr(value, "__name__", None) or str(value) for value in row)
