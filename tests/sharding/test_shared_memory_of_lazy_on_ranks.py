"""Lazy parameters whose data all ranks have in one memory: what one rank writes there, by any way, no other sees."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import functorch_shard as fs
from tests.support.pool import run_ranks

SIDE = 512  # a part of two is large enough for shared memory
aten = torch.ops.aten


def whole() -> Tensor:
    return torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE)


def sharded(mesh: fs.Mesh, **tensors: Tensor) -> fs.Sharded:
    return fs.shard(tensors, fs.plan(tensors, mesh, units=[[name] for name in tensors]))


def coded_on_this_rank() -> None:
    params = sharded(fs.init_mesh(), w=whole())
    codec = (lambda x: (x / 4, torch.full((1,), 4.0)), lambda encoded: encoded[0].mul_(encoded[1]))
    for _ in range(5):
        assert torch.equal(fs.gather(params, codec=codec)["w"] + 0, whole())


def test_a_decode_that_writes_to_its_message_writes_to_that_of_this_rank() -> None:
    run_ranks(coded_on_this_rank, 2)


def statistics_on_this_rank(inference: bool) -> None:
    mean, var = whole().flatten(), torch.ones(SIDE * SIDE)
    full = fs.gather(sharded(fs.init_mesh(), mean=mean, var=var))
    x = torch.zeros(2, SIDE * SIDE)
    with torch.inference_mode(inference), torch.no_grad():
        F.batch_norm(x, full["mean"], full["var"], momentum=0.5)  # reads them
        for i in range(1, 4):
            F.batch_norm(x, full["mean"], full["var"], training=True, momentum=0.5)
            dist.barrier()
            assert torch.equal(full["mean"] + 0, mean / 2**i)


@pytest.mark.parametrize("inference", [False, True])
def test_batch_norm_writes_to_statistics_of_this_rank(inference: bool) -> None:
    run_ranks(statistics_on_this_rank, 2, inference)


def summed_on_this_rank() -> None:
    full = fs.gather(sharded(fs.init_mesh(), w=whole()))
    for i in range(1, 4):
        dist.all_reduce(full["w"].detach())
        assert torch.equal(full["w"] + 0, whole() * 2**i)


def test_a_collective_of_torch_writes_to_memory_of_this_rank() -> None:
    run_ranks(summed_on_this_rank, 2)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "unsafe chunk": lambda w: w.unsafe_chunk(1)[0],
    "unsafe view": lambda w: aten._unsafe_view(w, [SIDE, SIDE]),
    "dropout": lambda w: F.dropout(w, training=False),
    "type as": lambda w: w.type_as(w),
    "einsum": lambda w: torch.einsum("ij->ij", w),
    "broadcast": lambda w: torch.broadcast_tensors(w)[0],
}


def viewed_on_this_rank() -> None:
    params = sharded(fs.init_mesh(), w=whole())
    for inference in (False, True):
        for name, view in VIEWS.items():
            with torch.inference_mode(inference), torch.no_grad():
                x = view(fs.gather(params)["w"])
                if type(x) is Tensor:  # and not lazy
                    x.mul_(2)
                    dist.barrier()
                    assert torch.equal(x, whole() * 2), name


def test_a_view_that_is_not_lazy_is_of_memory_of_this_rank() -> None:
    run_ranks(viewed_on_this_rank, 2)


def recorded_on_this_rank(backend: str) -> None:
    params = sharded(fs.init_mesh(), w=whole(), v=whole())

    def step(params: fs.Sharded) -> list[Tensor]:
        full = fs.gather(params)
        return [aten._unsafe_view(full["w"], [-1]).mul_(2) + 0, full["v"] * 3]

    compiled = fs.compile(step, backend=backend)
    for _ in range(4):
        twice, thrice = compiled(params)
        assert torch.equal(twice.view(SIDE, SIDE), whole() * 2)
        assert torch.equal(thrice, whole() * 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@pytest.mark.parametrize("backend", ["replay", "aot_eager"])
def test_a_recorded_write_is_to_memory_of_this_rank(backend: str) -> None:
    run_ranks(recorded_on_this_rank, 2, backend)


def forked_on_this_rank() -> str:
    """What a forked process reads after its parent let go, and all ranks wrote other values there."""
    mesh = fs.init_mesh()
    params, others = (sharded(mesh, w=whole() + i) for i in range(2))
    w = fs.gather(params)["w"]
    assert torch.equal(w + 0, whole())
    (to_read, to_write), (go, went) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.read(go, 1)
        os.write(to_write, str(torch.equal(w + 0, whole())).encode())
        os._exit(0)
    del w
    gc.collect()
    for _ in range(5):
        assert torch.equal(fs.gather(others)["w"] + 0, whole() + 1)
    os.write(went, b"1")
    os.close(to_write)
    return f"{os.read(to_read, 1000).decode()}, exit status {os.waitpid(child, 0)[1]}"


def test_a_forked_process_has_what_its_parent_had() -> None:
    assert run_ranks(forked_on_this_rank, 2) == ["True, exit status 0"] * 2
