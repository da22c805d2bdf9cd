"""Functions that Dynamo is told of, before and after it is imported."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import ModuleType

import pytest
import torch

from functorch_shard.torch_internals import dynamo
from functorch_shard.torch_internals.dynamo import without_compiling
from tests.support.compiling import Counted


def test_a_marked_function_may_be_freed_while_dynamo_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, dynamo._RULES, raising=False)

    def fn() -> None: ...

    dynamo.nonstrict(fn)
    monkeypatch.setitem(sys.modules, dynamo._RULES, ModuleType(dynamo._RULES))
    number = id(fn)
    del fn  # an error in a finalizer would be a warning, and so a failure
    assert number not in dynamo._MARKED


def test_threads_that_disable_the_compiler_at_once_leave_it_enabled() -> None:
    first_is_inside, second_is_inside, first_is_out = Event(), Event(), Event()

    def first() -> None:
        with without_compiling():
            first_is_inside.set()
            second_is_inside.wait(0.2)  # in vain
        first_is_out.set()

    def second() -> None:
        assert first_is_inside.wait(10)
        with without_compiling():
            second_is_inside.set()
            assert first_is_out.wait(10)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(first), pool.submit(second)]:
            done.result(20)
    backend = Counted("eager")
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert backend.graphs == 1
