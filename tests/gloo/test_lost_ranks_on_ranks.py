"""A rank that ends or stalls during a step is named in the error of every other rank, as real processes are lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.collectives import psum
from functorch_shard.gloo import lost_ranks as failures
from functorch_shard.testing import run_ranks
from tests.support.scripts import free_port

PATIENCE = 4  # seconds that a group waits
WINDOW = failures.window_of(timedelta(seconds=PATIENCE))
KILL_AFTER = 60  # seconds for all ranks of one case
Step = Callable[[fs.Mesh, Callable[[], None]], Any]


def end_by_exit() -> None:
    os._exit(1)


def end_by_exception() -> None:
    raise ValueError("a bug on this rank")


def end_by_kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stall() -> None:
    time.sleep(KILL_AFTER)


class Stop(nn.Module):
    """Passes values on; something happens there in forward, or in backward."""

    def __init__(self, forward: Callable[[], None] = lambda: None, backward: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._at = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        self._at[0]()
        y = x * 1
        y.register_hook(lambda grad: self._at[1]())
        return y


def train(mesh: fs.Mesh, stop: Stop) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), stop, nn.Linear(5, 3), nn.Linear(3, 5))
    params = fs.shard(model, fs.plan(model, mesh, units=[["0"], ["1"], ["3"], ["4"]]))
    leaves = fs.Sharded({key: x.clone().requires_grad_() for key, x in params.items()}, params.layout)
    torch.func.functional_call(model, fs.gather(leaves), (torch.ones(2, 5),)).sum().backward()


def in_forward(mesh: fs.Mesh, happens: Callable[[], None]) -> None:
    train(mesh, Stop(forward=happens))


def in_backward(mesh: fs.Mesh, happens: Callable[[], None]) -> None:
    train(mesh, Stop(backward=happens))


def in_psum(mesh: fs.Mesh, happens: Callable[[], None]) -> None:
    psum(torch.ones(3), mesh)
    happens()
    psum(torch.ones(3), mesh)


def in_reshard(mesh: fs.Mesh, happens: Callable[[], None]) -> None:
    model = nn.Linear(5, 7)
    old, new = fs.plan(model, mesh), fs.plan(model, mesh, labels=lambda name, x: name)
    params = fs.shard(model, old)
    agree = fs.Mesh.agree
    with patch.object(fs.Mesh, "agree", lambda *args: (agree(*args), happens())[0]):
        fs.reshard(params, new)


def lose(victim: int, how: Callable[[], None], step: Step, axes: Mapping[str, int], folder: str, port: int) -> None:
    """On every rank: do the step, in which one is lost, and write down what the others report."""
    torch.set_num_threads(1)
    mesh = fs.init_mesh(axes, device="cpu", timeout=PATIENCE)
    step(mesh, lambda: None)  # all ranks have what a first step takes, and are at one place
    psum(torch.ones(3), mesh)
    happens = how if mesh.rank == victim else lambda: None
    start = time.monotonic()
    try:
        step(mesh, happens)
    except RuntimeError as error:
        answer = str(error), str(error.__cause__), time.monotonic() - start
        Path(folder, f"{mesh.rank}.json").write_text(json.dumps(answer))


def on_rank(rank: int, num_ranks: int, port: int, work: Callable[[], None]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    work()


def reported_by_survivors(
    folder: Path, victim: int, how: Callable[[], None], step: Step, axes: Mapping[str, int]
) -> dict[int, tuple[str, str, float]]:
    """What each rank but the victim reported, its cause, and after how many seconds; as in a job without torchrun."""
    num_ranks, port = fs.simulated_mesh(axes).size, free_port()
    work = partial(lose, victim, how, step, axes, str(folder), port)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["functorch_shard.testing.processes", "torch._dynamo"])  # which a first step imports
    ranks = [context.Process(target=on_rank, args=(rank, num_ranks, port, work)) for rank in range(num_ranks)]
    survivors, deadline = [rank for rank in range(num_ranks) if rank != victim], time.monotonic() + KILL_AFTER
    for process in ranks:
        process.start()
    try:
        for rank in survivors:
            ranks[rank].join(max(deadline - time.monotonic(), 0))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in survivors}


def assert_each_names(victim: int, answers: Mapping[int, tuple[str, str, float]], what: str) -> None:
    for rank, (text, cause, seconds) in answers.items():
        assert f"rank {victim} did not respond" in text, (rank, text)
        here = re.search(r"ranks? ([\d, ]+) responded", text)
        assert here, (rank, text)
        assert {*map(int, here[1].split(", "))} <= {*answers}, (rank, text)
        assert re.match(what + " failed: ", text), (rank, text)
        assert "gloo/transport" in cause, (rank, cause)
        assert seconds < KILL_AFTER / 2, (rank, seconds)


GATHER, REDUCTION = (rf"{kind} of \d+ float32 for '\d' on axis 'shard'" for kind in ("all_gather", "psum_scatter"))
PSUM = r"psum of 3 float32 on axis '\w+'"
ANY = r"(all_gather|psum_scatter|psum) of \d+ float32 for '\d' on axis '\w+'"
CASES: dict[str, tuple[int, Callable[[], None], Step, dict[str, int], str]] = {
    "exits in forward": (2, end_by_exit, in_forward, {"shard": 3}, GATHER),
    "raises in backward": (1, end_by_exception, in_backward, {"shard": 3}, f"{GATHER}|{REDUCTION}"),
    "killed before a psum": (1, end_by_kill, in_psum, {"shard": 2}, PSUM),
    "stalls in forward": (1, stall, in_forward, {"shard": 3}, GATHER),
    "exits before a reshard": (1, end_by_exit, in_reshard, {"shard": 2}, "reshard"),
    "2x2 exits in backward": (3, end_by_exit, in_backward, {"replicate": 2, "shard": 2}, ANY),
    "2x2 stalls in forward": (1, stall, in_forward, {"replicate": 2, "shard": 2}, ANY),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_rank_that_is_left_names_the_one_that_is_lost(case: str, tmp_path: Path) -> None:
    victim, how, step, axes, what = CASES[case]
    answers = reported_by_survivors(tmp_path, victim, how, step, axes)
    assert_each_names(victim, answers, f"({what})")


@pytest.mark.slow
@pytest.mark.parametrize("how", [end_by_kill, freeze])
def test_the_rank_that_hosts_the_store_is_named_as_well(how: Callable[[], None], tmp_path: Path) -> None:
    answers = reported_by_survivors(tmp_path, 0, how, in_psum, {"shard": 3})
    assert len(answers) == 2
    for text, cause, _ in answers.values():
        assert re.search(r"failed: rank 0 (probably exited|did not respond)", text), text
        assert not re.search(r"ranks? [12].* did not respond", text), text
        assert "gloo/transport" in cause


def fails_otherwise_on_this_rank() -> tuple[str, float]:
    mesh, start = fs.init_mesh(), time.monotonic()
    with pytest.raises(RuntimeError) as error:
        psum(torch.ones(3, dtype=torch.float8_e4m3fn), mesh)
    return str(error.value), time.monotonic() - start


def test_an_error_that_no_rank_is_to_blame_for_stays_as_it_is() -> None:
    for text, seconds in run_ranks(fails_otherwise_on_this_rank, 2):
        assert "respond" not in text
        assert "failed: " not in text
        assert seconds < WINDOW


def undisturbed_on_this_rank() -> None:
    with patch.object(failures, "job_store", side_effect=AssertionError("asked without an error")):
        for step in (in_forward, in_psum, in_reshard):
            step(fs.init_mesh(), lambda: None)


def test_the_store_is_asked_only_after_an_error() -> None:
    run_ranks(undisturbed_on_this_rank, 2)


def test_a_rank_of_another_row_and_one_that_others_named_repeat_the_first_conclusion() -> None:
    store, first = dist.HashStore(), "rank 3 did not respond within 4 s (exited or stalled); rank 0 responded"
    store.set("functorch_shard/lost ranks/conclusion", first)
    for rank in (1, 3):
        found: list[str] = []
        with patch.object(dist, "get_rank", lambda rank=rank: rank), patch.object(dist, "get_world_size", lambda: 4):
            failures._call_roll(store, "psum of 'y'", [1, 2], 0.2, found.append)
        assert found == [first]


@pytest.mark.parametrize("timeout", [0, -1.0, timedelta()])
def test_a_timeout_is_above_zero(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout: got .*, expected more than 0 seconds"):
        fs.init_mesh(timeout=timeout)


def test_one_rank_alone_waits_for_nobody() -> None:
    with pytest.raises(ValueError, match="timeout: got 3, but the process group is made for one rank: omit it"):
        fs.init_mesh(timeout=3)
