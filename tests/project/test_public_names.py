"""Every public name has a docstring whose example runs, and a page of the site."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from typing import Any

import pytest
import torch
from torch import nn

import functorch_shard as fs
from tests.support.pages import ROOT

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
