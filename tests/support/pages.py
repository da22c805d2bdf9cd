"""Pages of the documentation: their blocks of Python, what these print, where their links lead; and docs' programs."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _pages() -> list[str]:
    """README.md and all that was written below docs, and not generated there."""
    found = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", *(str(page) for page in found if not {"_build", "generated"} & {*page.parts})]


PAGES = _pages()


@cache
def program(name: str, folder: Path = ROOT / "docs") -> Any:
    """The module of ``docs/NAME.py``, or in another folder, which is not in a package."""
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: str) -> list[str]:
    """The blocks of Python, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(page: str, capsys: pytest.CaptureFixture[str], wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Run the blocks from top to bottom in one namespace, and compare what they print with what they say."""
    namespace: dict[str, object] = {"__name__": page}
    for i, block in enumerate(blocks(page)):
        if wanted(block):
            exec(compile(block, f"{page}, block {i}", "exec"), namespace)
            printed, said = capsys.readouterr().out, re.findall(r"# > ?(.*)", block)
            assert not said or [line.rstrip() for line in printed.splitlines()] == said, f"block {i}: {printed!r}"


def links(page: str) -> list[tuple[Path, str]]:
    """The files that a page links to, each with the heading, or an empty text; entries of a toctree too."""
    text, place = (ROOT / page).read_text(), ROOT / page
    prose = re.sub(r"```(?!\{).*?```", "", text, flags=re.DOTALL)
    marked = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", re.sub(r"`[^`]*`", "", prose))
    found = [((place.parent / target).resolve() if target else place, anchor) for target, anchor in marked]
    for tree in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL):
        entries = [line.strip() for line in tree.splitlines() if line.strip() and not line.startswith(":")]
        found += [(path, "") for entry in entries for path in sorted(place.parent.glob(f"{entry}.md"))]
    return found


def anchors(page: Path) -> set[str]:
    """What headings of a page are called in links, by GitHub and by MyST."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
