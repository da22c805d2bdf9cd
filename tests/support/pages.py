"""The Python of a page of the documentation: its blocks, and what they print."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    """The blocks of Python, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(page: str, capsys: pytest.CaptureFixture[str], wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Run the blocks from top to bottom in one namespace, and compare what they print with what they say."""
    namespace: dict[str, object] = {"__name__": page}
    for i, block in enumerate(blocks(page)):
        if wanted(block):
            exec(compile(block, f"{page}, block {i}", "exec"), namespace)
            printed, said = capsys.readouterr().out, re.findall(r"# > (.*)", block)
            assert not said or [line.rstrip() for line in printed.splitlines()] == said, f"block {i}: {printed!r}"
