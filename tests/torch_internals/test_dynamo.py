"""Functions that Dynamo is told of, before and after it is imported."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from functorch_shard.torch_internals import dynamo


def test_a_marked_function_may_be_freed_while_dynamo_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, dynamo._RULES, raising=False)

    def fn() -> None: ...

    dynamo.nonstrict(fn)
    monkeypatch.setitem(sys.modules, dynamo._RULES, ModuleType(dynamo._RULES))
    number = id(fn)
    del fn  # an error in a finalizer would be a warning, and so a failure
    assert number not in dynamo._MARKED
