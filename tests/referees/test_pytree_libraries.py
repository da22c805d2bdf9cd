"""The programs of torchopt and tensordict on docs/pytree_libraries.md."""

from __future__ import annotations

import re

import pytest

from tests.support.pages import run


@pytest.mark.parametrize("library", ["torchopt", "tensordict"])
def test_the_python_of_the_page_runs_with_their_programs(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(library)
    others = re.compile(r"^(?:import|from) (?!torch\b|optree|functorch_shard)(\w+)", re.MULTILINE)
    run("docs/pytree_libraries.md", capsys, lambda block: {*others.findall(block)} <= {library})
