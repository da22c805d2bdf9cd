"""Collectives that nobody waits for, freed at any moment, keep no rank waiting. Note [Abandoned] in work.py."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.collectives import psum
from functorch_shard.communication.headers import SMALL_MESSAGE
from functorch_shard.testing import run_ranks

SMALL, BY_SOCKETS = 5, SMALL_MESSAGE


def collected_on_this_rank(threshold: int) -> None:
    """Collections fall into the start of collectives too, in gloo's C++."""
    mesh = fs.init_mesh()
    gc.set_threshold(threshold)
    for i in range(300):
        freed_later: list[Any] = [mesh["shard"].issue("all_gather", torch.ones(BY_SOCKETS if i % 10 == 0 else SMALL))]
        freed_later.append(freed_later)
    assert psum(torch.tensor(1.0), mesh) == mesh.size


@pytest.mark.parametrize("threshold", [17, 23, 37, 50])
def test_the_garbage_collector_may_free_them_in_the_middle_of_another_collective(threshold: int) -> None:
    run_ranks(collected_on_this_rank, 2, threshold)


def freed_with_its_mesh_on_this_rank(numel: int) -> None:
    """Rank 1 is behind; the process group stays, and another mesh goes on with it."""
    for i in range(3):
        mesh = fs.init_mesh()
        if mesh.rank == 1:
            time.sleep(0.05)
        mesh["shard"].issue("all_gather", torch.full((numel,), float(i)))
        del mesh
        gc.collect()
        assert psum(torch.full((numel,), 1.0 + i), fs.init_mesh()).unique() == 2 + 2 * i


@pytest.mark.parametrize("numel", [SMALL, BY_SOCKETS, 50 * BY_SOCKETS])
def test_one_that_is_freed_with_its_mesh_does_not_disturb_the_next_mesh(numel: int) -> None:
    run_ranks(freed_with_its_mesh_on_this_rank, 2, numel)
