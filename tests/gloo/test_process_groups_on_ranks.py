"""Process groups that were made otherwise than by init_mesh move bytes the same way."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import functorch_shard as fs
from functorch_shard.gloo.backend import GlooBackend
from functorch_shard.testing import run_ranks
from functorch_shard.torch_internals.tensors import timeout_of
from tests.support.different_units import SMALL, alternately, assert_trained, train
from tests.support.ranks import HYBRID

PROGRAM: tuple[Any, ...] = 2, SMALL, alternately, 2


def wrapped_for_debugging(**options: Any) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL
    dist.init_process_group("gloo", **options)


def on_this_rank(start: Callable[..., None], folder: str) -> tuple[Any, ...]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # all have connected
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", size)
    start(store=store, rank=rank, world_size=size, timeout=timedelta(seconds=77))
    with pytest.raises(ValueError, match="timeout: only of a process group that is made here"):
        fs.init_mesh(HYBRID, timeout=4)
    mesh = fs.init_mesh(HYBRID, device="cpu")
    fs.checkpoint.save(f"{folder}/saved", {"x": torch.ones(3)})  # of no layout: by all ranks of the job
    backends: list[Any] = [axis.backend for axis in mesh]
    waits = {timeout_of(backend.group).total_seconds() for backend in backends}
    return {type(backend) for backend in backends}, waits, train(mesh, *PROGRAM)


@pytest.mark.parametrize("start", [dist.init_process_group, wrapped_for_debugging])
def test_any_way_to_make_a_gloo_group_takes_the_fast_backend_its_timeout_and_trains(start: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(partial(on_this_rank, start), 4, folder)
    assert [result[:2] for result in results] == [({GlooBackend}, {77.0})] * len(results)
    assert_trained([trained for *_, trained in results], *PROGRAM)
