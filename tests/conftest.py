"""What all tests share: ranks that start from a server which has loaded what they use, and kinds of ranks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from typing import Any

import pytest
import torch

from tests.support.covering import mark_other_cases_slow
from tests.support.fork_server import preload
from tests.support.ranks import DEFAULT, Ranks
from tests.support.torch_globals import NAMES, Globals

# Files of few tests that take long.
LONG = (
    "test_laws.py",
    "test_on_ranks.py",
    "test_examples.py",
    "test_nestings.py",
    "test_launching_on_ranks.py",
    "test_benchmarks.py",
    "test_lost_ranks_on_ranks.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """xdist would start files of few tests last, and one worker would wait for the other one's long file."""
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before -m chooses among them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    mark_other_cases_slow(items)


def pytest_collection(session: pytest.Session) -> None:
    """Collecting makes half a million objects that stay; to look for garbage among them takes seconds."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start the server of this process, at once, so that it loads while the first tests run."""
    preload()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """As each gloo rank has: sums of more threads have other bits, and small tensors gain nothing from them."""
    torch.set_num_threads(1)


@pytest.fixture(params=DEFAULT, ids=str)
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Simulated ranks in different numbers, and real ones; ``parametrize("ranks", ...)`` has others in their place."""
    return request.param


def globals_of_torch() -> dict[str, Any]:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(getattr(dynamo, "_stance", None), "stance", "default")
    return {"stance": stance, **{f"{module.__name__}.{name}": getattr(module, name) for module, name in NAMES}}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that leaves one of torch's globals changed fails: under some of them torch.compile compiles nothing, and
    tests that run later in the same process would fail instead."""
    before, at_end = globals_of_torch(), Globals()
    try:
        return (yield)
    finally:
        after = globals_of_torch()
        at_end.restore()
        assert after == before, f"left behind: {after}, before: {before}"
