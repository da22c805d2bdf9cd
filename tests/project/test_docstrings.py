"""Every example in a docstring runs, and every public name has one."""

import doctest
import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
from torch import nn

import functorch_shard as fs

MODULES = [importlib.import_module(module.name) for module in pkgutil.walk_packages(fs.__path__, "functorch_shard.")]
FINDER = doctest.DocTestFinder(exclude_empty=True)
EXAMPLES = [test for module in MODULES for test in FINDER.find(module) if test.examples]
NAMESPACES = ["checkpoint", "codecs", "collectives", "communication", "curvature", "debug", "replicas", "testing"]
FUNCTIONS: dict[str, Any] = {
    f"{space}.{name}".lstrip("."): function
    for space in ["", *NAMESPACES]
    for module in [getattr(fs, space) if space else fs]
    for name in module.__all__
    if inspect.isfunction(function := getattr(module, name))
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_docstring_example_prints_what_it_says(example: doctest.DocTest) -> None:
    example.globs.update(fs=fs, torch=torch, nn=nn)
    failures: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=flags).run(example, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_function_documents_its_arguments_result_and_example(name: str) -> None:
    doc, signature = inspect.getdoc(FUNCTIONS[name]) or "", inspect.signature(FUNCTIONS[name])
    assert len(doc.splitlines()[0]) <= 120
    assert ">>>" in doc
    if signature.parameters:
        assert "Args:" in doc or name.startswith("testing.count")
        absent = [parameter for parameter in signature.parameters if f"{parameter}" not in doc]
        assert not absent, f"not in the docstring: {absent}"


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name in fs.__all__ if not getattr(fs, name).__doc__] == []
