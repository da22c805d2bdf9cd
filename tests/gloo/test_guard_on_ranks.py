"""Ranks that issue different collectives all raise the same error at once, whatever they issue instead."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

import functorch_shard as fs
from functorch_shard.collectives import all_gather, pmax, psum, ragged_all_to_all
from functorch_shard.gloo.backend import FORKED, OTHER_THREAD
from functorch_shard.testing import run_ranks
from tests.support.ranks import as_any_group
from tests.support.refusals import text_of
from tests.support.scripts import free_port


def short_mesh(seconds: float) -> fs.Mesh:
    group: Any = dist.new_group(timeout=timedelta(seconds=seconds))
    return fs.Mesh.from_device_mesh(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",)))


def forward(mesh: fs.Mesh, order: list[int]) -> None:
    """Use units of one size, one by one."""
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    full = fs.gather(fs.shard(dict(model.named_parameters()), fs.plan(model, mesh)))
    for i in order:
        full[f"{i}.weight"].sum()


ONES = torch.ones(4)
# What every rank but the last does, what the last one does, and what tells them apart.
DIFFERENT: dict[str, tuple[Callable[[fs.Mesh], Any], Callable[[fs.Mesh], Any], str, str]] = {
    "another unit of the same size": (
        lambda mesh: forward(mesh, [0, 1, 2, 3]),
        lambda mesh: forward(mesh, [2, 3]),
        r"2: all_gather of \d+ float32 for '0'",
        r"2: all_gather of \d+ float32 for '2'",
    ),
    "size of long messages": (  # behind two that open the memory for them
        lambda mesh: all_gather(torch.ones(20_000), mesh),
        lambda mesh: all_gather(torch.ones(19_999), mesh),
        "3: all_gather of 20,000 float32",
        "3: all_gather of 19,999 float32",
    ),
    "dim": (
        lambda mesh: all_gather(ONES.view(2, 2), mesh, dim=1),
        lambda mesh: all_gather(ONES.view(2, 2), mesh, dim=0),
        "1: all_gather of 4 float32, dim 1",
        "1: all_gather of 4 float32",
    ),
    "kind": (
        lambda mesh: psum(ONES, mesh),
        lambda mesh: pmax(ONES, mesh),
        "1: psum of 4 float32",
        "1: pmax of 4 float32",
    ),
    "one less": (
        lambda mesh: [psum(ONES[:i], mesh) for i in range(1, 5) for _ in range(4)],
        lambda mesh: [psum(ONES[:i], mesh) for i in range(1, 5) for _ in range(4 - (i == 2))],
        "8: psum of 2 float32",
        "8: psum of 3 float32",
    ),
}


def different_on_this_rank() -> dict[str, str]:
    odd, told = dist.get_rank() == dist.get_world_size() - 1, {}
    for name, case in DIFFERENT.items():
        told[name] = text_of(case[1] if odd else case[0], mesh := short_mesh(60))
        assert text_of(lambda mesh: psum(torch.ones(3), mesh), mesh) == told[name]  # the axis stays refused
    return told


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_reports_the_first_collective_that_differs_and_what_each_issued(num_ranks: int) -> None:
    """Whatever differs, kind, size, dtype or unit: none waits, none is taken for another, and no process is aborted."""
    answers = run_ranks(different_on_this_rank, num_ranks)
    for name, (_, _, usual, odd) in DIFFERENT.items():
        told = {answer[name] for answer in answers}
        assert len(told) == 1, told
        text = told.pop()
        assert text.startswith("RuntimeError: ")
        number, _, wanted = usual.partition(": ")
        title, *lines = text.splitlines()
        assert title.endswith(f" issue different collectives, each as its number {number}:")
        for rank in range(num_ranks):
            expected = odd.partition(": ")[2] if rank == num_ranks - 1 else wanted
            assert re.fullmatch(f"  rank {rank}: {expected}", lines[rank])


def by_another_library_on_this_rank() -> list[str]:
    """What ranks hear whose group is not taken for gloo's: of an uneven exchange, which is right; of another kind."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # torch reads the variable when it is imported
    mesh = short_mesh(60).with_backend(as_any_group)
    told = [text_of(lambda mesh: ragged_all_to_all(torch.ones(3), mesh, [[1, 2], [0, 1]]), mesh)]
    return [*told, text_of(lambda mesh: (pmax if mesh.rank else psum)(torch.ones(3), mesh), mesh)]


def test_ranks_of_other_libraries_are_compared_by_torchs_debug_mode() -> None:
    for right, text in run_ranks(by_another_library_on_this_rank, 2):
        assert right == ""
        assert text.startswith("RuntimeError: ")
        assert "Detected mismatch between collectives on ranks" in text


def profiled_on_this_rank() -> None:
    mesh, x = fs.init_mesh(), torch.ones(5)
    with profile(activities=[ProfilerActivity.CPU]):
        for _ in range(200):
            with saved_tensors_hooks(lambda x: x, lambda x: x):  # which what is recorded keeps, and frees at its end
                works = [mesh["shard"].issue("psum", x) for _ in range(3)]
            assert all(work.wait().tolist() == [2.0] * 5 for work in works)


def test_a_profiler_does_not_hang_ranks_that_look_whether_collectives_have_begun() -> None:
    run_ranks(profiled_on_this_rank, 2, timeout=60)


def two_threads_on_this_rank() -> list[str]:
    """Each waits for its own collective before the other begins; the ranks differ in which one is first."""
    mesh, told = fs.init_mesh(), list[str]()
    thread = Thread(target=lambda: told.append(text_of(lambda mesh: psum(torch.tensor(1.0), mesh), mesh)))
    if mesh.rank == 1:
        thread.start()
        thread.join()
    told.append(text_of(lambda mesh: psum(torch.tensor(10.0), mesh), mesh))
    if mesh.rank == 0:
        thread.start()
        thread.join()
    return told


def test_collectives_of_two_threads_are_never_taken_for_each_other() -> None:
    for answers in run_ranks(two_threads_on_this_rank, 2):
        for text in answers:
            assert text.startswith("RuntimeError: ")
            assert f"rank 1: psum of 1 float32{OTHER_THREAD}" in text


def forked_from_this_rank() -> list[str]:
    """What a forked process is told that issues a collective, and waits for one; the rank itself goes on."""
    mesh = fs.init_mesh()
    begun = mesh["shard"].issue("all_gather", torch.ones(3))
    reader, writer = os.pipe()
    if (process := os.fork()) == 0:
        told = [text_of(lambda mesh: psum(torch.ones(3), mesh), mesh), text_of(lambda _: begun.wait(), mesh)]
        os.write(writer, json.dumps(told).encode())
        os._exit(0)
    os.waitpid(process, 0)
    assert begun.wait().tolist() == [1.0] * 3 * mesh.size
    assert psum(torch.tensor(1.0), mesh) == mesh.size
    return json.loads(os.read(reader, 1 << 16))


def test_a_process_that_was_forked_from_a_rank_is_refused_and_the_rank_goes_on() -> None:
    for answers in run_ranks(forked_from_this_rank, 2):
        assert answers == [f"RuntimeError: {FORKED}"] * 2


def other_axis_on_this_rank() -> str:
    dist.barrier()  # all have connected
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"])
    mesh = fs.init_mesh({"replicate": 2, "shard": 2}, device="cpu", timeout=4)
    return text_of(lambda mesh: psum(torch.ones(3), mesh["shard" if mesh.rank in (0, 3) else "replicate"]), mesh)


@pytest.mark.slow
def test_ranks_that_wait_on_different_axes_report_which_waits_where() -> None:
    with patch.dict(os.environ, TEST_PORT=str(free_port())):
        answers = run_ranks(other_axis_on_this_rank, 4)
    for text in answers:
        assert "all of its ranks responded, and wait for each other in different collectives" in text
        assert "psum of 3 float32 on axis 'shard'" in text
        assert "psum of 3 float32 on axis 'replicate'" in text
