"""Offloading on real ranks fails on all of them, trains to the same values bitwise, and within a limit on memory."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.storage.memory_kind import memory_kind_of
from functorch_shard.testing import run_ranks
from tests.benchmarks.resident import status
from tests.support.offloaded import ADAMW, SAMPLES, files_in, gradient_of, largest_file, leaves_of, model_of, same_bits

MEGABYTE = 1 << 20
ALLOWED = 24 * MEGABYTE  # of private memory, beside what torch itself takes
tree_map: Any = optree.tree_map


# within a limit, which Linux applies to private memory and not to mapped files


def train(directory: str | None, depth: int) -> tuple[list[float], int]:
    """Losses of AdamW's steps in memory or in files, and the bytes of parameters, gradients and two moments."""
    width, mesh = 512, fs.init_mesh()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    layout, opt = fs.plan(model, mesh), fs.optimizer(torch.optim.AdamW, lr=1e-3)
    room = {key: torch.zeros((), dtype=b.dtype).expand(b.shard_numel) for key, b in layout.buffers.items()}
    params: Any = fs.Sharded(room, layout)
    params = fs.offload(params, directory) if directory else tree_map(torch.Tensor.contiguous, params)
    for i, shard in enumerate(params.values()):
        shard.copy_(torch.randn(len(shard), generator=torch.Generator().manual_seed(i)) / width**0.5)
    state = opt.init(params)
    if directory:
        state = fs.offload(state, directory)

    def loss_fn(params: fs.Sharded, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, fs.gather(params), (x,)).square().mean()

    losses = []
    for i in range(3):
        x = torch.randn(mesh.size, 8, width, generator=torch.Generator().manual_seed(i))[mesh.rank]
        grads, loss = fs.grad_and_value(lambda p, x=x: functional_call(model, fs.gather(p), (x,)).square().mean())(
            params
        )
        params, state = opt.step(params, grads=grads, state=state, donate=True)
        losses.append(loss.item())
        del grads
    return losses, 4 * sum(x.nbytes for x in room.values())


def train_within(directory: str | None, allowed: int | None, depth: int) -> tuple[list[float], int]:
    libc, mmap_threshold = ctypes.CDLL(None), -3
    assert libc.mallopt(mmap_threshold, 1 << 17) == 1  # have malloc give large blocks back when they are freed
    train(directory, 2)  # what torch loads when it is first used
    if allowed:
        limit = int(status("VmData")) + allowed
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return train(directory, depth)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_within_a_fifth_of_its_state_gives_the_losses_of_training_in_memory(
    ranks: int, tmp_path: Path
) -> None:
    depth = 32 * ranks
    limited = run_ranks(train_within, ranks, str(tmp_path), ALLOWED, depth)
    free = run_ranks(train_within, ranks, None, None, depth)
    for (losses, size), (expected, _) in zip(limited, free, strict=True):
        assert size > 5 * ALLOWED
        assert losses == expected
        assert len(set(losses)) == 3
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
