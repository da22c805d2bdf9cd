"""Offloading on real ranks fails on all of them, trains to the same values bitwise, and within a limit on memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

import functorch_shard as fs
from functorch_shard.storage.memory_kind import memory_kind_of
from functorch_shard.testing import run_ranks
from tests.benchmarks.offload import resident, train
from tests.support.offloaded import ADAMW, SAMPLES, files_in, gradient_of, largest_file, leaves_of, model_of, same_bits

MEGABYTE = 1 << 20
ALLOWED = 24 * MEGABYTE  # of private memory, beside what torch itself takes
tree_map: Any = optree.tree_map


# within a limit


def train_within(directory: str | None, allowed: int | None, depth: int) -> dict[str, Any]:
    options = {"width": 512, "steps": 3}
    train(directory and f"{directory}/warm", None, depth=2, **options)  # what torch loads when it is first used
    limit = resident("VmData") + allowed if allowed else None
    return train(directory and f"{directory}/at work", limit, depth=depth, **options)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_within_a_fifth_of_its_state_gives_the_losses_of_training_in_memory(
    ranks: int, tmp_path: Path
) -> None:
    depth = 32 * ranks
    limited = run_ranks(train_within, ranks, str(tmp_path), ALLOWED, depth)
    free = run_ranks(train_within, ranks, None, None, depth)
    for mine, expected in zip(limited, free, strict=True):
        assert mine["state"] > 5 * ALLOWED
        assert mine["losses"] == expected["losses"]
        assert len(set(mine["losses"])) == 3
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run_ranks(train_within, ranks, None, ALLOWED, depth)


# on two ranks, in one directory


def steps_of(params: fs.Sharded, state: Any) -> tuple[Any, ...]:
    losses = []
    for x in SAMPLES:
        x = params.layout.mesh.split(x)
        grads = gradient_of(params, x)
        params, state = ADAMW.step(params, grads=grads, state=state, donate=True)
        losses.append(grads)
    return losses, params, state


def train_in_one_directory(directory: str, axes: dict[str, int]) -> list[bool]:
    mesh = fs.init_mesh(axes)
    start = fs.shard(model_of(), fs.plan(model_of(), mesh))
    expected = steps_of(tree_map(torch.clone, start), ADAMW.init(start))
    params = fs.offload(start, directory)
    trained = steps_of(params, fs.offload(ADAMW.init(params), directory))
    in_files = [memory_kind_of(x).directory is not None for x in leaves_of(trained[0])]
    return [same_bits(trained, expected), same_bits(params, expected[1]), *in_files]


@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2}], ids=str)
def test_training_in_files_is_bitwise_that_in_memory(axes: dict[str, int], tmp_path: Path) -> None:
    for result in run_ranks(train_in_one_directory, 2, str(tmp_path), axes):
        assert all(result)
    assert files_in(tmp_path) == []


# what one rank alone meets


def full_disk_of_one_rank(directory: str) -> str:
    tree = {"x": torch.full((100,), float(dist.get_rank()))}  # of no mesh: of all ranks of the job
    with largest_file(100 if dist.get_rank() == 1 else 1 << 40), pytest.raises((OSError, RuntimeError)) as caught:
        fs.offload(tree, directory)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_error_on_one_rank_is_reported_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(full_disk_of_one_rank, 2, str(tmp_path))
    assert second.startswith("OSError: [Errno 27] File too large: 400 bytes needed")
    assert first.startswith("RuntimeError: offload failed on rank 1, so no rank can go on. There:")
    assert "400 bytes needed" in first
