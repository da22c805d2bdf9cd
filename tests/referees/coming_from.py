"""A page of docs/coming_from: its rows, and the programs that try them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.pages import ROOT

Program = Callable[[], None]


@dataclass(frozen=True)
class Page:
    """Each row of the page's table has a program that fails where the row is wrong."""

    name: str
    tried: dict[str, Program] = field(default_factory=dict)

    def row(self, words: str) -> Callable[[Program], Program]:
        """Have the function try the row whose first column begins with ``words``."""

        def kept(program: Program) -> Program:
            self.tried[words] = program
            return program

        return kept

    def not_tried(self) -> list[str]:
        """Rows without a program; programs are in the order of the rows."""
        text = (ROOT / "docs/coming_from" / f"{self.name}.md").read_text()
        rows, words = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)[1:], [*self.tried]
        assert len(rows) == len(words), (rows, words)
        return [row for row, word in zip(rows, words, strict=True) if not row.startswith(word)]


def same(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    """Both are arrays of equal values."""
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=tolerance, atol=tolerance)
