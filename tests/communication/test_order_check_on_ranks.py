"""Ranks that do not issue the same collectives: under checks an error on every rank that says what and who, no hang."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.collectives import pmax, psum, psum_scatter
from functorch_shard.communication import Collective, Work, checked, wrap
from functorch_shard.communication.wrapper import Issue
from functorch_shard.testing import run_ranks
from tests.support.differing import DIFFERENT, ONES, error_of, forward, short_mesh


def differ_on_this_rank() -> dict[str, tuple[str, str]]:
    plain, reported = fs.init_mesh(), {}
    odd = plain.rank == plain.size - 1
    for name, case in DIFFERENT.items():
        mesh = plain.with_backend(checked)
        reported[name] = error_of(case[1] if odd else case[0], mesh)
        assert psum(1 + ONES, mesh).tolist() == [2 * mesh.size] * 4  # and then the ranks are still in step
    mesh = plain.with_backend(checked)
    psum(ONES, mesh)
    twice = [error_of(lambda mesh: (pmax if odd else psum)(ONES, mesh), mesh)[1] for _ in range(2)]
    assert "Before that, the same" in twice[1]
    assert twice[0].splitlines()[1].partition(": ")[2] not in twice[1]  # it was not the same on all ranks
    return reported


@cache
def reported_differences(num_ranks: int) -> list[dict[str, tuple[str, str]]]:
    return run_ranks(differ_on_this_rank, num_ranks, timeout=60)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("case", DIFFERENT)
def test_every_rank_reports_the_first_collective_that_differs(case: str, num_ranks: int) -> None:
    *_, usual, odd = DIFFERENT[case]
    reported = {answer[case] for answer in reported_differences(num_ranks)}
    assert len(reported) == 1
    kind, text = reported.pop()
    assert kind == "RuntimeError"
    lines = text.splitlines()
    assert lines[0] == "checked: axis 'shard': the ranks differ."
    for rank in range(num_ranks):
        assert re.fullmatch(f"  rank {rank}: {odd if rank == num_ranks - 1 else usual}", lines[1 + rank])
    number = int(usual.partition(":")[0])
    assert len(lines) == 1 + num_ranks + (number > 1) + min(number - 1, 5) + 1
    if number > 1:
        assert lines[1 + num_ranks] == "Before that, the same on all ranks:"
        assert lines[-2].startswith(f"  {number - 1}: ")
    assert lines[-1].startswith("Every rank must use the same parameters in the same order")


PATIENCE = 8.0
LATE = 1.25 * PATIENCE
NO_LATER = 4 * PATIENCE  # with processes to spare; far from the limit of run_ranks


def stall(mesh: fs.Mesh, absent: bool) -> None:
    if absent:
        time.sleep(LATE)
    psum(ONES, mesh)


def fail(mesh: fs.Mesh, absent: bool) -> None:
    """Between two units, in the middle of a backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), _Fails() if absent else nn.Identity(), nn.Linear(5, 5))
    params = fs.shard(dict(model.named_parameters()), fs.plan(model, mesh))
    fs.grad(lambda p: functional_call(model, fs.gather(p), (torch.ones(5),)).sum())(params)


class _Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(self.fail)
        return x

    def fail(self, grad: Tensor) -> None:
        raise ArithmeticError("a bad batch")


def stay_away_on_this_rank() -> list[tuple[str, str, float]]:
    world, reported = fs.init_mesh(), []
    for program, first_absent in ((stall, world.size - 1), (fail, 1)):
        mesh, absent = short_mesh(PATIENCE).with_backend(checked), world.rank >= first_absent
        psum(ONES, mesh)
        start = time.monotonic()
        kind, text = error_of(lambda mesh, p=program, a=absent: p(mesh, a), mesh)
        reported.append((kind, text, time.monotonic() - start))
        dist.barrier()  # of all, beside the group that has broken
    return reported


NUMBERS = 2, 3


@cache
def every_absence() -> dict[int, list[list[tuple[str, str, float]]]]:
    """Of each number of ranks, which wait for most of the time, at once."""
    run = partial(run_ranks, stay_away_on_this_rank, timeout=90)
    with ThreadPoolExecutor() as threads:
        return dict(zip(NUMBERS, threads.map(run, NUMBERS), strict=True))


def reported_absences(num_ranks: int) -> list[list[tuple[str, str, float]]]:
    return every_absence()[num_ranks]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", NUMBERS)
def test_a_rank_that_stalls_is_named_on_all_others_and_gets_an_error_when_it_comes(num_ranks: int) -> None:
    *waiting, (late, _) = reported_absences(num_ranks)
    absent, others = num_ranks - 1, ", ".join(str(rank) for rank in range(num_ranks - 1))
    for (kind, text, seconds), _ in waiting:
        assert kind == "RuntimeError"
        lines = text.splitlines()
        assert lines[0].startswith(
            f"checked: axis 'shard': rank {absent} did not respond before collective 2: psum of 4"
        )
        assert "Each waits 8 s for the others" in lines[0]
        assert lines[1 : 1 + num_ranks] == [
            *(f"  rank {rank}: 2: psum of 4 float32" for rank in range(absent)),
            f"  rank {absent}: did not respond",
        ]
        assert lines[2 + num_ranks] == "  1: psum of 4 float32"
        assert PATIENCE - 1 < seconds < NO_LATER
    kind, text, seconds = late
    assert kind == "RuntimeError"
    assert text.startswith("checked: axis 'shard': ")
    assert f"rank {others} did not respond before" in text or "a rank stopped responding" in text
    assert LATE <= seconds < NO_LATER


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_raise_are_all_named(num_ranks: int) -> None:
    (_, (kind, text, seconds)), *failed = reported_absences(num_ranks)
    assert [(kind, text) for _, (kind, text, _) in failed] == [("ArithmeticError", "a bad batch")] * (num_ranks - 1)
    assert kind == "RuntimeError"
    absent = ", ".join(str(rank) for rank in range(1, num_ranks))
    assert text.startswith(f"checked: axis 'shard': rank {absent} did not respond before collective ")
    assert re.search(r"\n  rank 0: 6: psum_scatter of \d+ float32 for '0'\n", text)
    assert seconds < NO_LATER


def end_on_this_rank(rank: int, num_ranks: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    mesh = fs.init_mesh().with_backend(checked)
    psum(ONES, mesh)
    if rank == num_ranks - 1:
        os._exit(3)
    start = time.monotonic()
    answer = *error_of(lambda mesh: psum_scatter(torch.ones(6), mesh), mesh), time.monotonic() - start
    Path(folder, f"{rank}.json").write_text(json.dumps(answer))
    os._exit(0)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_ended_is_named_at_once(num_ranks: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    arguments = [(rank, num_ranks, str(tmp_path)) for rank in range(num_ranks)]
    ranks = [context.Process(target=end_on_this_rank, args=each) for each in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
    assert [process.exitcode for process in ranks] == [0] * (num_ranks - 1) + [3]
    for rank in range(num_ranks - 1):
        kind, text, seconds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert kind == "RuntimeError"
        assert f"\n  rank {num_ranks - 1}: did not respond\n" in text
        assert f"\n  rank {rank}: 2: psum_scatter of 6 float32\n" in text
        assert seconds < 30


def broken(op: Collective, x: Tensor, send: Issue) -> Work:
    """The connection is cut while a gather is under way."""
    return Work(cut) if op.kind == "all_gather" else send(op, x)


def cut() -> Tensor:
    raise RuntimeError("cut")


def broken_on_this_rank() -> tuple[str, str]:
    mesh = fs.init_mesh().with_backend(wrap(broken)).with_backend(checked)
    return error_of(lambda mesh: forward(mesh, "equal", [0, 1]), mesh)


def traced_on_this_rank() -> tuple[str, str]:
    mesh = fs.init_mesh().with_backend(checked)
    model = nn.Linear(2, 2)
    return error_of(lambda mesh: fs.compile(lambda x: fs.plan(model, mesh) and x, backend="replay")(ONES), mesh)


def test_what_is_refused_keeps_its_error() -> None:
    for kind, text in run_ranks(traced_on_this_rank, 2):
        assert kind == "NotImplementedError"
        assert "is done before" in text


def test_what_breaks_under_way_is_reported_with_the_collective_it_was() -> None:
    for kind, text in run_ranks(broken_on_this_rank, 2):
        assert kind == "RuntimeError"
        first, *history = text.splitlines()  # the gather ahead was issued since
        assert re.fullmatch(
            r"checked: axis 'shard': all ranks agreed on 2: all_gather of \d+ float32 for '0', and then it failed: cut",
            first,
        )
        assert history == ["Before that, the same on all ranks:", "  1: exchange of 32 uint8"]
