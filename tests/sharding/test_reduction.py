"""Reducing by differentiable collectives and while backward goes on: the same sums in the same order, bitwise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.collectives.sinks import Sink
from functorch_shard.communication import Backend, Collective, Finished, Work
from functorch_shard.gloo.backend import SMALL_MESSAGE
from functorch_shard.layout.trees import pack
from functorch_shard.sharding.reduction import Part, Reductions
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import Ranks, gloo

# Parameters of one buffer each time: awkward ones, and with them more than a small message for each rank.
SMALL: list[tuple[int, ...]] = [(3, 5), (), (0, 3), (7,), (1,), (17, 31), (0,), (2, 3, 5)]
LARGE: list[tuple[int, ...]] = [(0, 3), *SMALL, (211, 503), (5,), (), (101, 307), (7, 1009), (13,), (97, 311)]
KINDS: dict[str, tuple[list[tuple[int, ...]], torch.dtype, torch.dtype | None]] = {
    "small": (SMALL, torch.float32, None),
    "large": (LARGE, torch.float32, None),
    "nothing but empty ones": ([(0, 3), (0,)], torch.float32, None),
    "large, float16": ([*LARGE, (409, 307)], torch.float16, None),
    "small, complex": (SMALL, torch.complex64, None),
    "large, summed in bfloat16": ([*LARGE, (409, 307)], torch.float32, torch.bfloat16),
}


def grads_of(kind: str, rank: int) -> dict[str, Tensor]:
    """Of magnitudes so different that another order of addition shows; every second one is stored transposed."""
    shapes, dtype, _ = KINDS[kind]
    generator = torch.Generator().manual_seed(rank)
    powers = torch.tensor([1e-4, 1.0, 1e4] if dtype == torch.float16 else [1e-7, 1.0, 1e7])

    def draw(shape: tuple[int, ...]) -> Tensor:
        scale = powers[torch.randint(3, shape, generator=generator)]
        x = torch.rand(shape, generator=generator) * scale + scale
        return torch.complex(x, x.flip(0) if x.ndim else -x) if dtype.is_complex else x.to(dtype)

    values = [draw(shape) for shape in shapes]
    return {f"p{i}": x.mT.contiguous().mT if x.ndim > 1 and i % 2 else x for i, x in enumerate(values)}


def planned(kind: str, mesh: fs.Mesh, reduction: Any = "mean") -> fs.Layout:
    precision = fs.MixedPrecision(reduce_dtype=KINDS[kind][2])
    # the alignment leaves gaps between all of them
    return fs.plan(grads_of(kind, 0), mesh, units=10**9, align_bytes=64, reduction=reduction, precision=precision)


def started(reductions: Reductions, grads: dict[str, Tensor], layout: fs.Layout, key: str) -> None:
    """Start to reduce the gradients of a buffer."""
    part = Part(0, (layout.buffers[key],), layout)
    reductions.start(part, [grads[name] for name in part.names], range(1), 1, Sink(), True)


def result(reductions: Reductions, key: str) -> Tensor:
    (total,) = reductions.finish([key], 1, Sink())
    assert total is not None
    return total


def both_ways(grads: Any, layout: fs.Layout) -> tuple[Tensor, Tensor]:
    (buffer,) = layout.buffers.values()
    reductions = Reductions()
    started(reductions, grads, layout, buffer.key)
    return fs.scatter_grads(grads, layout)[buffer.key], result(reductions, buffer.key)


def reduced(mesh: fs.Mesh) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    cases = product(KINDS, ("mean", "sum"))
    return {(kind, by): both_ways(grads_of(kind, mesh.rank), planned(kind, mesh, by)) for kind, by in cases}


def sum_in_rank_order(kind: str, layout: fs.Layout) -> Tensor:
    """Whole buffers, added up from the first rank to the last, each sum rounded."""
    (buffer,) = layout.buffers.values()
    dtype = KINDS[kind][2] or buffer.dtype
    before = 2 if dtype == torch.float16 and layout.reduction == "mean" else 1  # FSDP's, for 2 and for 3 ranks
    total, *others = [pack(grads_of(kind, rank), buffer).to(dtype) / before for rank in range(layout.num_ranks)]
    for addend in others:
        total = total + addend
    total = total.to(torch.promote_types(dtype, buffer.dtype))  # divided there, and cast once
    return (total / (layout.num_ranks / before) if layout.reduction == "mean" else total).to(buffer.dtype)


@pytest.mark.parametrize("ranks", gloo(3), ids=str)
def test_sums_are_in_rank_order_and_the_same_both_ways_bitwise(ranks: Ranks) -> None:
    results = ranks.run(reduced)
    for kind, reduction in product(KINDS, ("mean", "sum")):
        layout = planned(kind, fs.simulated_mesh(ranks.size), reduction)
        (buffer,) = layout.buffers.values()
        nbytes = buffer.shard_numel * (KINDS[kind][2] or buffer.dtype).itemsize
        assert (nbytes > SMALL_MESSAGE) == kind.startswith("large")
        expected = sum_in_rank_order(kind, layout).chunk(ranks.size) if buffer.numel else [torch.zeros(0)] * ranks.size
        for rank, found in enumerate(results):
            for total in found[kind, reduction]:
                assert total.dtype == buffer.dtype, kind
                assert torch.equal(total, expected[rank]), (kind, reduction, rank)


class SlowBackend(Backend):
    """Two ranks with equal values; a reduction reads its operand until it lands, a while after it was waited for."""

    def __init__(self, waited: Event) -> None:
        self.waited = waited

    def index(self) -> int:
        return 0

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        if op.kind == "psum_scatter":
            return Work(lambda: (self.waited.set(), sleep(0.2), 2 * x.chunk(2, op.dim)[0])[-1])
        return Finished(torch.cat([x, x], op.dim) if op.kind == "exchange" else 2 * x)


def test_memory_that_is_still_sent_from_is_not_laid_out_anew_by_another_thread() -> None:
    sending, reductions = Event(), Reductions()
    mesh = fs.simulated_mesh(2).with_backend(lambda axis: SlowBackend(sending))
    layout = fs.plan({"a.w": torch.zeros(8), "b.w": torch.zeros(8)}, mesh)
    started(reductions, {"a.w": torch.ones(8)}, layout, "a")
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(result, reductions, "a")
        assert sending.wait(60)
        started(reductions, {"b.w": torch.full((8,), 100.0)}, layout, "b")
        assert_trees_close(waiting.result(), torch.ones(4))
    assert_trees_close(result(reductions, "b"), torch.full((4,), 100.0))
