"""Errors that others published: which are found by what varies, which by running on other ranks; none is left."""

from __future__ import annotations

import re
from functools import partial

import pytest

import functorch_shard as fs
from functorch_shard.debug import types
from functorch_shard.testing import assert_rank_invariant
from tests.support.pages import ROOT
from tests.support.public_bugs import BUGS, MESHES, step, whole

PAGE = (ROOT / "docs/explanation/what_varies.md").read_text()


def found_by_types(name: str, wrong: bool) -> bool:
    """Whether the table has a problem, or a result varies that should be the same on every rank."""
    run, args = step(fs.simulated_mesh(MESHES[-1]), name, wrong)
    found = types(run, *args)
    shards = [path for path in found.results if "grads" in path or name == "verl#7493"]
    return bool(found.problems) or any(axes for path, axes in found.results.items() if path not in shards)


def found_by_invariance(name: str, wrong: bool) -> bool:
    try:
        assert_rank_invariant(partial(whole, name=name, wrong=wrong), MESHES, rtol=0, atol=1e-12)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", BUGS)
def test_the_right_version_raises_no_alarm(name: str) -> None:
    assert not found_by_types(name, wrong=False)
    assert not found_by_invariance(name, wrong=False)


@pytest.mark.parametrize("name", BUGS)
def test_the_wrong_version_is_found_as_the_page_says(name: str) -> None:
    row = re.search(rf"^\| \[{name}\]\([^)]*\) \| .* \| (yes|no)\b[^|]* \| (yes|no) \|$", PAGE, re.MULTILINE)
    assert row, name
    found = found_by_types(name, wrong=True), found_by_invariance(name, wrong=True)
    assert tuple(text == "yes" for text in row.groups()) == found
    assert any(found)
