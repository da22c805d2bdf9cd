"""What all tests share: ranks that start from a server which has loaded what they use, and kinds of ranks."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Generator
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch

from tests.support.covering import mark_other_cases_slow
from tests.support.ranks import DEFAULT, Ranks

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


# What processes that the server forks have loaded, so that a start takes a tenth of a second.
PRELOADED = [
    "functorch_shard.testing.processes",
    "hypothesis",
    "pytest",
    "torch._decomp.decompositions_for_jvp",  # compiled by torch.jit when it is imported
    "torch._dynamo",  # torch.func imports it when a transform is used first
    "torch.distributed.device_mesh",
    "torch.testing",
]
# Globals of torch's modules that its transforms, tracers and modes set while they run.
GLOBALS = (
    (eager_transforms, "JVP_NESTING"),  # how deep jvp is nested
    (forward_ad, "_current_level"),  # -1 outside of forward mode
    (_symbolic_trace, "CURRENT_PATCHER"),  # whose replacements Dynamo undoes
    (_symbolic_trace, "_is_fx_tracing_flag"),
    (proxy_tensor, "_CURRENT_MAKE_FX_TRACER"),
    (proxy_tensor, "CURRENT_DECOMPOSITION_TABLE"),  # of torch 2.11 and before
    (_python_dispatch, "_is_in_torch_dispatch_mode"),
    (_python_dispatch, "_is_in_non_infra_torch_dispatch_mode"),
    (_python_dispatch, "_is_in_any_mode_without_ignore_compile_internals"),
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
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """As each gloo rank has: sums of more threads have other bits, and small tensors gain nothing from them."""
    torch.set_num_threads(1)


@pytest.fixture(params=DEFAULT, ids=str)
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Simulated ranks in different numbers, and real ones; ``parametrize("ranks", ...)`` has others in their place."""
    return request.param


def globals_of_torch() -> dict[Any, Any]:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(getattr(dynamo, "_stance", None), "stance", "default")
    found = {(module, name): getattr(module, name) for module, name in GLOBALS if hasattr(module, name)}
    return {"stance": stance, **found}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that leaves one of torch's globals changed fails: under some of them torch.compile compiles nothing, and
    tests that run later in the same process would fail instead."""
    before = globals_of_torch()
    try:
        return (yield)
    finally:
        after = globals_of_torch()
        for module, name in before.keys() - {"stance"}:
            setattr(module, name, before[module, name])
        know: Any = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
        if know is not None:  # Dynamo's copy of one of them, since 2.13
            know(_python_dispatch._is_in_any_mode_without_ignore_compile_internals)
        assert after == before, f"left behind: {after}, before: {before}"
