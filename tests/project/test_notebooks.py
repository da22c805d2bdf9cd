"""Tutorials are one text: a page of the site, a notebook made from it, and functions that are those of an example."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import ROOT, program

made = program("notebooks")
every_page = pytest.mark.parametrize("page", made.PAGES, ids=lambda page: page.stem)
FROM_EXAMPLES = {"hessian_spectrum": "lanczos", "test_your_sharding": "unit_test_your_sharding"}  # others: of one name


def stored(page: Path) -> dict[str, Any]:
    return json.loads((made.NOTEBOOKS / f"{page.stem}.ipynb").read_text(encoding="utf-8"))


def functions(source: str) -> dict[str, str]:
    """Functions by name, wherever they are, without comments."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.unparse(node) for node in found}


@every_page
def test_a_notebook_is_what_the_command_writes(page: Path) -> None:
    written = (made.NOTEBOOKS / f"{page.stem}.ipynb").read_text(encoding="utf-8")
    assert written == made.notebook(page), "run python docs/notebooks.py"


def test_every_notebook_has_a_page_and_every_page_links_to_its_notebook() -> None:
    assert {path.stem for path in made.NOTEBOOKS.glob("*.ipynb")} == {page.stem for page in made.PAGES}
    assert len(made.PAGES) >= 5
    for page in made.PAGES:
        assert f"(../../examples/notebooks/{page.stem}.ipynb)" in page.read_text()


@pytest.mark.slow
@every_page
def test_the_programs_of_a_notebook_run_in_order_and_give_what_is_below_them(page: Path) -> None:
    cells = [cell for cell in stored(page)["cells"] if cell["cell_type"] == "code"]
    results = made.run([made.Cell("".join(cell["source"]), True) for cell in cells], page.stem)
    for cell, (printed, value) in zip(cells, results, strict=True):
        outputs = {output["output_type"]: output for output in cell["outputs"]}
        assert made.same_lines(printed, "".join(outputs.get("stream", {}).get("text", []))), printed
        if "display_data" in outputs:
            assert "".join(outputs["display_data"]["data"]["image/svg+xml"]) == value._repr_svg_()
        else:
            assert value is None


@pytest.mark.parametrize("page", made.PAGES[1:], ids=lambda page: page.stem)
def test_functions_of_a_tutorial_are_those_of_its_example(page: Path) -> None:
    name = FROM_EXAMPLES.get(page.stem, page.stem)
    assert f"(../../examples/{name}.py)" in page.read_text()
    theirs = functions((ROOT / "examples" / f"{name}.py").read_text())
    ours = functions("\n".join(cell.source for cell in made.cells(page) if cell.is_code))
    common = ours.keys() & theirs.keys()
    assert len(common) >= 4
    assert {name: ours[name] for name in common} == {name: theirs[name] for name in common}


@every_page
def test_links_of_a_notebook_lead_to_a_file(page: Path) -> None:
    prose = "\n".join("".join(cell["source"]) for cell in stored(page)["cells"] if cell["cell_type"] == "markdown")
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", prose)
    assert targets
    assert [target for target in targets if not (made.NOTEBOOKS / target).exists()] == []
