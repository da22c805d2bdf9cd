"""README.md and every page of docs do what they say: their Python runs, and what they name exists."""

from __future__ import annotations

import re
from functools import cache

import pytest

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


OTHERS = re.compile(r"^(?:import|from) (?:torchopt|scipy)\b", re.MULTILINE)  # in tests/referees
TUTORIALS = [str(page.relative_to(ROOT)) for page in program("notebooks").PAGES]  # tests/project/test_notebooks.py
WITH_PYTHON = [page for page in PAGES if blocks(page) and page not in TUTORIALS]
TABLE = re.compile(r"\[`(test_\w+)`\]\((?:\.\./)*(tests/[\w/]+\.py)\)")


def named(text: str) -> list[tuple[str, str]]:
    """Tests that a page names, as (file, function)."""
    return [*re.findall(r"(tests/[\w/]+\.py)::(\w+)", text), *((path, name) for name, path in TABLE.findall(text))]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(page, capsys, lambda block: not OTHERS.search(block))


def test_pages_of_examples_have_them() -> None:
    assert len(WITH_PYTHON) >= 15
    assert sum(len(blocks(page)) for page in WITH_PYTHON) >= 60


def test_tests_files_and_modules_that_pages_name_exist() -> None:
    wrong: list[tuple[str, str]] = []
    for page in (*PAGES, "SECURITY.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        tests = {path: (ROOT / path).read_text() if (ROOT / path).exists() else "" for path, _ in named(text)}
        wrong += [(page, f"{path}::{name}") for path, name in named(text) if f"def {name}(" not in tests[path]]
        paths = re.findall(r"(?:examples|tests|\.ci)/[\w/.]+\w", text)
        wrong += [(page, path) for path in paths if not (ROOT / path).exists()]
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
