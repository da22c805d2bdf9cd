"""Real ranks answer, fail or time out, but never hang."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import functorch_shard as fs
from functorch_shard.testing import RankError, assert_trees_close, run_ranks


def identity(*args: Any, **kwargs: Any) -> Any:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), args, kwargs


def test_results_come_in_rank_order_with_arguments_sent_both_ways() -> None:
    layout = fs.plan({"w": torch.zeros(5)}, fs.simulated_mesh(2))
    params = fs.shard({"w": torch.arange(5.0)}, layout)
    args, kwargs = (torch.arange(3), params), {"text": "yes", "none": None, "nested": [{"x": torch.tensor(2.0)}]}
    results = run_ranks(identity, 3, *args, **kwargs)
    for rank, result in enumerate(results):
        assert result[:3] == (rank, 3, 1)
        assert_trees_close(result[3:], (args, kwargs), rtol=0, atol=0)
        assert isinstance(result[3][1], fs.Sharded)
        assert result[3][1].layout == layout


def variable(name: str) -> str | None:
    return os.environ.get(name)


class CannotPickleError(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = lambda: what


def note_pid(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()


def fail(folder: str, how: str) -> Any:
    """Rank 1 does as told; the others wait for it in a collective."""
    note_pid(folder)
    if dist.get_rank() == 1:
        return FAILURES[how][0]()
    dist.all_reduce(torch.ones(3))
    return None


def raise_it(error: BaseException) -> None:
    raise error


AGAIN = "(?s)rank 1 raised what cannot be raised again here:.*"
FAILURES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "raise": (lambda: {}["absent"], KeyError, "absent"),
    "cannot_pickle": (lambda: raise_it(CannotPickleError("broken")), RankError, AGAIN + "CannotPickleError: broken"),
    "exit": (lambda: sys.exit(4), RankError, AGAIN + "SystemExit: 4"),
    "die": (lambda: os._exit(3), RankError, "rank 1 died without an answer, exit code 3"),
    "result": (lambda: lambda: None, Exception, "Can't (pickle|get) local"),  # AttributeError, or PicklingError
}


def assert_all_gone(folder: Path, num_ranks: int) -> None:
    pids = [int(path.name) for path in folder.iterdir()]
    assert len(pids) <= num_ranks
    assert not {child.pid for child in multiprocessing.active_children()} & {*pids}
    deadline = time.monotonic() + 5  # the server reaps them
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("how", FAILURES)
def test_the_first_failure_is_raised_and_those_who_wait_for_it_are_ended(how: str, tmp_path: Path) -> None:
    _, kind, text = FAILURES[how]
    started = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        run_ranks(fail, 3, str(tmp_path), how)
    assert time.monotonic() - started < 100  # run_ranks would give up after 120
    if how != "die":
        cause = str(caught.value.__cause__)
        assert cause.startswith("on rank 1:\nTraceback")
        assert "test_processes.py" in cause or how == "result"
    assert_all_gone(tmp_path, 3)


def hang(folder: str) -> None:
    note_pid(folder)
    if dist.get_rank() == 1:
        time.sleep(600)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ended_by_the_timeout(tmp_path: Path) -> None:
    run_ranks(identity, 1)  # the start of the server is not what is timed
    with pytest.raises(RankError, match=r"no answer from rank \[1\] within 4 s; all were ended\nrank 1: ") as caught:
        run_ranks(hang, 3, str(tmp_path), timeout=4)
    assert "in hang\n" in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 3
    assert_all_gone(tmp_path, 3)


def late(seconds: float) -> None:
    time.sleep(seconds * dist.get_rank())
    raise ValueError(f"rank {dist.get_rank()}")


def test_of_several_exceptions_the_first_in_time_is_raised() -> None:
    with pytest.raises(ValueError, match="rank 0"):
        run_ranks(late, 3, 0.2)


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    for fn, *args in ((lambda: None,), (identity, lambda: None)):
        with pytest.raises(Exception, match=r"Can't pickle .*lambda"):
            run_ranks(fn, 2, *args)
    assert run_ranks(functools.partial(variable, "RANK"), 2) == ["0", "1"]
