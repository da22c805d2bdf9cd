"""Tutorials as notebooks: ``python docs/notebooks.py`` runs each page and writes ``examples/notebooks/NAME.ipynb``.

A page is the source: its prose, its blocks of Python, and what they print, which is below them in lines that begin with
``# > ``. Where a block ends with a picture (``fs.visualize(layout)``), the next line of the page shows its file, which
is written as well.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
PAGES = [ROOT / "docs/start/first_step.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]
_BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n!\[[^\]]*\]\(([^)]*\.svg)\)\n)?", re.DOTALL)
_PRINTED = re.compile(r"^# > ?(.*\n)", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """Prose, or a program with what it prints and the file of the picture that it ends with."""

    source: str
    is_code: bool = False
    printed: str = ""
    picture: Path | None = None


def cells(page: Path) -> list[Cell]:
    """The parts of a page in order; links lead from where the notebook is."""
    text, found, end = page.read_text(encoding="utf-8"), [], 0
    for block in _BLOCK.finditer(text):
        found += [Cell(_prose(text[end : block.start()], page)), _program(block, page)]
        end = block.end()
    return [cell for cell in (*found, Cell(_prose(text[end:], page))) if cell.source]


def _program(block: re.Match[str], page: Path) -> Cell:
    source, picture = block.groups()
    place = (page.parent / picture).resolve() if picture else None
    return Cell(_PRINTED.sub("", source).strip(), True, "".join(_PRINTED.findall(source)), place)


def _prose(text: str, page: Path) -> str:
    def moved(link: re.Match[str]) -> str:
        return f"]({os.path.relpath((page.parent / link[1]).resolve(), NOTEBOOKS)}{link[2] or ''})"

    return re.sub(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)", moved, text).strip()


def run(programs: list[Cell], name: str) -> Iterator[tuple[str, Any]]:
    """What each program prints, and the value of the expression that it ends with, in one namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(programs):
        with redirect_stdout(io.StringIO()) as printed:
            value = _value(cell.source, namespace, f"{name}, block {number}")
        yield printed.getvalue(), value


def _value(source: str, namespace: dict[str, Any], where: str) -> Any:
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), where, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), where, "eval"), namespace) if isinstance(last, ast.Expr) else None


def same_lines(printed: str, said: str) -> bool:
    """Whether they are equal but for spaces at the end of lines."""
    texts = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, said)]
    return texts[0] == texts[1]


def notebook(page: Path) -> str:
    """The page in the format of Jupyter, with what its programs give."""
    jupyter = [_in_jupyter(f"part-{number}", cell) for number, cell in enumerate(cells(page))]
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": jupyter, "metadata": {"kernelspec": python, "language_info": {"name": "python"}}}
    return json.dumps({**whole, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False) + "\n"


def _in_jupyter(name: str, cell: Cell) -> dict[str, Any]:
    same = {"id": name, "metadata": {}, "source": cell.source.splitlines(keepends=True)}
    if not cell.is_code:
        return {"cell_type": "markdown", **same}
    return {"cell_type": "code", "execution_count": None, **same, "outputs": [*_outputs(cell)]}


def _outputs(cell: Cell) -> Iterator[dict[str, Any]]:
    if cell.printed:
        yield {"output_type": "stream", "name": "stdout", "text": cell.printed.splitlines(keepends=True)}
    if cell.picture:
        svg = cell.picture.read_text(encoding="utf-8").splitlines(keepends=True)
        yield {"output_type": "display_data", "data": {"image/svg+xml": svg}, "metadata": {}}


def main() -> None:
    NOTEBOOKS.mkdir(exist_ok=True)
    for page in PAGES:
        programs = [cell for cell in cells(page) if cell.is_code]
        for cell, (printed, value) in zip(programs, run(programs, page.name), strict=True):
            if not same_lines(printed, cell.printed):
                raise SystemExit(f"{page}: a block prints\n{printed}\nand the page says\n{cell.printed}")
            if cell.picture:
                cell.picture.write_text(value.svg(), encoding="utf-8")
        (NOTEBOOKS / f"{page.stem}.ipynb").write_text(notebook(page), encoding="utf-8")


if __name__ == "__main__":
    main()
