"""Pages of the documentation do what they say: their Python runs, and the tests that they name exist."""

from __future__ import annotations

import re

import pytest

from tests.support.pages import ROOT, blocks, run

PAGES = ["docs/pytree_libraries.md", "docs/transforms.md"]
OTHERS = re.compile(r"^(?:import|from) (?:torchopt|scipy)\b", re.MULTILINE)  # in tests/referees


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(page, capsys, lambda block: not OTHERS.search(block))


def test_pages_of_examples_have_them() -> None:
    assert len(blocks("docs/pytree_libraries.md")) >= 5


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", (ROOT / page).read_text())
    assert named
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_the_readme_links_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"]({page})" in readme for page in PAGES)
