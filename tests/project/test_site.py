"""The documentation site has every public name."""

from __future__ import annotations

import re

import functorch_shard as fs
from tests.support.pages import ROOT

API = (ROOT / "docs/reference/api.md").read_text()
NAMESPACES = ["checkpoint", "codecs", "collectives", "communication", "curvature", "debug", "testing"]


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
