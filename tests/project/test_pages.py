"""Pages, tutorials and docstrings do what they say: their Python runs, and what they name exists."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import functorch_shard as fs
from tests.referees.table import HEADER, referees
from tests.support.pages import PAGES, ROOT, anchors, blocks, links, program, run

REFEREES = (ROOT / "docs" / "referees.md").read_text()
LINES = [line.strip("| ").split(" | ") for line in REFEREES.splitlines() if line.startswith("| ")]


def test_the_page_of_referees_has_a_line_for_every_program_in_order() -> None:
    assert REFEREES.count("| " + " | ".join(HEADER) + " |") == 1
    assert [line[0] for line in LINES[1:]] == [str(referee) for referee in referees()]


def test_the_page_of_referees_says_how_a_program_is_refused() -> None:
    words = {str(referee): [referee.batched, referee.refused, referee.gloo] for referee in referees()}
    for line in LINES[1:]:
        assert [word for word in words[line[0]] if word and word not in line[-1]] == []


def test_the_page_of_referees_has_no_error_of_another_library() -> None:
    assert "RAISES" not in "\n".join(" ".join(line) for line in LINES)


# Their blocks run in tests/referees.
OTHERS = re.compile(r"^(?:import|from) (?:torchopt|scipy|jax|tensordict|transformers)\b", re.MULTILINE)
NOTEBOOKS = program("notebooks")
TUTORIALS = [str(page.relative_to(ROOT)) for page in NOTEBOOKS.PAGES]
WITH_PYTHON = [page for page in PAGES if blocks(page) and page not in TUTORIALS]
TABLE = re.compile(r"\[`(test_\w+)`\]\((?:\.\./)*(tests/[\w/]+\.py)\)")


def named(text: str) -> list[tuple[str, str]]:
    """Tests that a page names, as (file, function)."""
    return [*re.findall(r"(tests/[\w/]+\.py)::(\w+)", text), *((path, name) for name, path in TABLE.findall(text))]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(page, capsys, lambda block: not OTHERS.search(block))


def test_tests_files_and_modules_that_pages_name_exist() -> None:
    wrong: list[tuple[str, str]] = []
    for page in (*PAGES, "SECURITY.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        tests = {path: (ROOT / path).read_text() if (ROOT / path).exists() else "" for path, _ in named(text)}
        wrong += [(page, f"{path}::{name}") for path, name in named(text) if f"def {name}(" not in tests[path]]
        paths = re.findall(r"(?:examples|tests|\.ci)/[\w/.]+\w", text)
        wrong += [(page, path) for path in paths if not (ROOT / path).exists()]
        names = re.findall(r"`(test_\w+\.py)`", text)
        wrong += [(page, name) for name in names if not [*(ROOT / "tests").rglob(name)]]
        for module in re.findall(r"python -m (tests\.[\w.]+)", text):
            place = ROOT / module.replace(".", "/")
            if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists():
                wrong.append((page, module))
    assert wrong == []


def test_links_inside_the_repository_lead_to_a_file_and_a_heading() -> None:
    headings = cache(anchors)
    found = [(page, target, anchor) for page in PAGES for target, anchor in links(page)]
    wrong = [one for one in found if not one[1].exists() or (one[2] and one[2] not in headings(one[1]))]
    assert wrong == []


def test_every_station_of_a_step_is_a_function_or_a_class_of_the_file() -> None:
    text = (ROOT / "docs/explanation/one_step.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` `(\w+)` \|", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == [*range(1, len(rows) + 1)]
    assert 10 <= len(rows) <= 15
    texts = {path: (Path(fs.__file__).parent / path).read_text() for _, path, _ in rows}
    assert [row for row in rows if not re.search(rf"^(def|class) {row[2]}\b", texts[row[1]], re.MULTILINE)] == []


def test_every_tick_of_the_table_of_peers_links_to_a_test() -> None:
    table = (ROOT / "docs/reference/peers.md").read_text()
    assert len(TABLE.findall(table)) > 60
    cells = [line.split("|")[-2].strip() for line in table.splitlines() if line.startswith("| ")]
    assert all("tests/" in cell for cell in cells if cell.startswith("✔"))


def test_every_page_is_reached_from_the_readme() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        found = {target for page in new for target, _ in links(str(page.relative_to(ROOT)))}
        new = {target for target in found if target.suffix == ".md"} - reached
    assert [page for page in PAGES if ROOT / page not in reached] == []


API = (ROOT / "docs/reference/api.md").read_text()


def listed() -> dict[str, list[str]]:
    """The names that are listed for each module, from top to bottom."""
    names: dict[str, list[str]] = {}
    module = ""
    for line in API.splitlines():
        if current := re.match(r"\.\. currentmodule:: (.*)", line):
            module = current.group(1)
        elif entry := re.match(r"   (\w+)$", line):
            names.setdefault(module, []).append(entry.group(1))
    return names


def test_every_public_name_has_a_page_of_its_own() -> None:
    names = listed()
    assert [name for name in fs.__all__ if name not in names["functorch_shard"]] == []
    assert [name for name in names["functorch_shard"] if not hasattr(fs, name)] == []
    for space in NAMESPACES:
        assert sorted(names[f"functorch_shard.{space}"]) == sorted(getattr(fs, space).__all__), space


MODULES = [importlib.import_module(module.name) for module in pkgutil.walk_packages(fs.__path__, "functorch_shard.")]
FINDER = doctest.DocTestFinder(exclude_empty=True)
EXAMPLES = {module.__name__: [test for test in FINDER.find(module) if test.examples] for module in MODULES}
NAMESPACES = ["checkpoint", "codecs", "collectives", "communication", "curvature", "debug", "testing"]
FUNCTIONS: dict[str, Any] = {
    f"{space}.{name}".lstrip("."): function
    for space in ["", *NAMESPACES]
    for module in [getattr(fs, space) if space else fs]
    for name in module.__all__
    if inspect.isfunction(function := getattr(module, name))
}


@pytest.mark.parametrize("module", [name for name, examples in EXAMPLES.items() if examples])
def test_docstring_examples_print_what_they_say(module: str) -> None:
    failures: list[str] = []
    for example in EXAMPLES[module]:
        example.globs.update(fs=fs, torch=torch, nn=nn)
        doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=failures.append)
    assert not failures, "".join(failures)


def test_public_functions_document_their_arguments_and_have_an_example() -> None:
    assert len(FUNCTIONS) > 30
    for name, function in FUNCTIONS.items():
        doc, parameters = inspect.getdoc(function) or "", inspect.signature(function).parameters
        assert len(doc.splitlines()[0]) <= 120, name
        assert ">>>" in doc, name
        assert not parameters or "Args:" in doc or name.startswith("testing.count"), name
        assert [parameter for parameter in parameters if parameter not in doc] == [], name


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name in fs.__all__ if not getattr(fs, name).__doc__] == []


every_page = pytest.mark.parametrize("page", NOTEBOOKS.PAGES, ids=lambda page: page.stem)
FROM_EXAMPLES = {"hessian_spectrum": "lanczos", "test_your_sharding": "unit_test_your_sharding"}  # others: of one name


def stored(page: Path) -> dict[str, Any]:
    return json.loads((NOTEBOOKS.NOTEBOOKS / f"{page.stem}.ipynb").read_text(encoding="utf-8"))


def functions(source: str) -> dict[str, str]:
    """Functions by name, wherever they are, without comments."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.unparse(node) for node in found}


@every_page
def test_a_notebook_is_what_the_command_writes(page: Path) -> None:
    written = (NOTEBOOKS.NOTEBOOKS / f"{page.stem}.ipynb").read_text(encoding="utf-8")
    assert written == NOTEBOOKS.notebook(page), "run python docs/notebooks.py"


def test_every_notebook_has_a_page_and_every_page_links_to_its_notebook() -> None:
    assert {path.stem for path in NOTEBOOKS.NOTEBOOKS.glob("*.ipynb")} == {page.stem for page in NOTEBOOKS.PAGES}
    assert len(NOTEBOOKS.PAGES) >= 5
    for page in NOTEBOOKS.PAGES:
        assert f"(../../examples/notebooks/{page.stem}.ipynb)" in page.read_text()


@pytest.mark.slow
@every_page
def test_the_programs_of_a_notebook_run_in_order_and_give_what_is_below_them(page: Path) -> None:
    cells = [cell for cell in stored(page)["cells"] if cell["cell_type"] == "code"]
    results = NOTEBOOKS.run([NOTEBOOKS.Cell("".join(cell["source"]), True) for cell in cells], page.stem)
    for cell, (printed, value) in zip(cells, results, strict=True):
        outputs = {output["output_type"]: output for output in cell["outputs"]}
        assert NOTEBOOKS.same_lines(printed, "".join(outputs.get("stream", {}).get("text", []))), printed
        if "display_data" in outputs:
            assert "".join(outputs["display_data"]["data"]["image/svg+xml"]) == value._repr_svg_()
        else:
            assert value is None


WITH_EXAMPLE = [page for page in NOTEBOOKS.PAGES[1:] if page.stem != "score_matching"]  # whose program is the page


@pytest.mark.parametrize("page", WITH_EXAMPLE, ids=lambda page: page.stem)
def test_functions_of_a_tutorial_are_those_of_its_example(page: Path) -> None:
    name = FROM_EXAMPLES.get(page.stem, page.stem)
    assert f"(../../examples/{name}.py)" in page.read_text()
    theirs = functions((ROOT / "examples" / f"{name}.py").read_text())
    ours = functions("\n".join(cell.source for cell in NOTEBOOKS.cells(page) if cell.is_code))
    common = ours.keys() & theirs.keys()
    assert len(common) >= 4
    assert {name: ours[name] for name in common} == {name: theirs[name] for name in common}
