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
Step = Callable[[fs.Mesh, Callable[[], Any]], Any]
EXIT, STALL = partial(os._exit, 1), partial(time.sleep, KILL_AFTER)
RAISE = partial(int, "a bug on this rank")
KILL, FREEZE = (partial(signal.raise_signal, number) for number in (signal.SIGKILL, signal.SIGSTOP))


def train(mesh: fs.Mesh, happens: Callable[[], Any], in_backward: bool) -> None:
    def at_the_second_layer(layer: nn.Module, args: Any, y: Tensor) -> None:
        if in_backward:
            y.register_hook(lambda grad: happens())
        else:
            happens()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 5))
    model[1].register_forward_hook(at_the_second_layer)
    params = fs.shard(model, fs.plan(model, mesh, units=[["0"], ["1"], ["2"], ["3"]]))
    leaves = fs.Sharded({key: x.clone().requires_grad_() for key, x in params.items()}, params.layout)
    torch.func.functional_call(model, fs.gather(leaves), (torch.ones(2, 5),)).sum().backward()


in_forward, in_backward = (partial(train, in_backward=backward) for backward in (False, True))


def in_psum(mesh: fs.Mesh, happens: Callable[[], Any]) -> None:
    psum(torch.ones(3), mesh)
    happens()
    psum(torch.ones(3), mesh)


def while_others_compute(mesh: fs.Mesh, happens: Callable[[], Any]) -> None:
    happens()
    mesh["shard"].issue("all_gather", torch.ones(3))
    time.sleep(1)
    psum(torch.ones(3), mesh)  # finds that the gather failed


def in_reshard(mesh: fs.Mesh, happens: Callable[[], Any]) -> None:
    model = nn.Linear(5, 7)
    old, new = fs.plan(model, mesh), fs.plan(model, mesh, labels=lambda name, x: name)
    params = fs.shard(model, old)
    agree = fs.Mesh.agree
    with patch.object(fs.Mesh, "agree", lambda *args: (agree(*args), happens())[0]):
        fs.reshard(params, new)


def lose(victim: int, how: Callable[[], Any], step: Step, axes: Mapping[str, int], folder: str, port: int) -> None:
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
    folder: Path, victim: int, how: Callable[[], Any], step: Step, axes: Mapping[str, int]
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


GATHER, REDUCTION = (rf"{kind} of \d+ float32 for '\d' on axis 'shard'" for kind in ("all_gather", "psum_scatter"))
PSUM = r"psum of 3 float32 on axis '\w+'"
ANY = r"(all_gather|psum_scatter|psum) of \d+ float32 for '\d' on axis '\w+'"
CASES: dict[str, tuple[int, Callable[[], Any], Step, dict[str, int], str]] = {
    "exits in forward": (2, EXIT, in_forward, {"shard": 3}, GATHER),
    "raises in backward": (1, RAISE, in_backward, {"shard": 3}, f"{GATHER}|{REDUCTION}"),
    "killed before a psum": (1, KILL, in_psum, {"shard": 2}, PSUM),
    "exits while others compute": (1, EXIT, while_others_compute, {"shard": 2}, PSUM.replace("psum", "all_gather")),
    "stalls in forward": (1, STALL, in_forward, {"shard": 3}, GATHER),
    "exits before a reshard": (1, EXIT, in_reshard, {"shard": 2}, "reshard"),
    "2x2 exits in backward": (3, EXIT, in_backward, {"replicate": 2, "shard": 2}, ANY),
    "2x2 stalls in forward": (1, STALL, in_forward, {"replicate": 2, "shard": 2}, ANY),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_rank_that_is_left_names_the_one_that_is_lost(case: str, tmp_path: Path) -> None:
    victim, how, step, axes, what = CASES[case]
    answers = reported_by_survivors(tmp_path, victim, how, step, axes)
    for rank, (text, cause, seconds) in answers.items():
        assert f"rank {victim} did not respond" in text, (rank, text)
        here = re.search(r"ranks? ([\d, ]+) responded", text)
        assert here, (rank, text)
        assert {*map(int, here[1].split(", "))} <= {*answers}, (rank, text)
        assert re.match(f"({what}) failed: ", text), (rank, text)
        assert "gloo/transport" in cause, (rank, cause)
        assert seconds < KILL_AFTER / 2, (rank, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("how", [KILL, FREEZE], ids=["killed", "stopped"])
def test_the_rank_that_hosts_the_store_is_named_as_well(how: Callable[[], Any], tmp_path: Path) -> None:
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


def test_a_rank_of_another_row_and_one_that_others_named_repeat_the_first_conclusion() -> None:
    store, first = dist.HashStore(), "rank 3 did not respond within 4 s (exited or stalled); rank 0 responded"
    store.set("functorch_shard/lost ranks/conclusion", first)
    for rank in (1, 3):
        found: list[str] = []
        with patch.object(dist, "get_rank", lambda rank=rank: rank), patch.object(dist, "get_world_size", lambda: 4):
            failures._call_roll(store, "psum of 'y'", [1, 2], 0.2, found.append)
        assert found == [first]
