"""Accumulation, with a reduction at the end or with one for each microbatch: the gradient of the big batch."""

from __future__ import annotations

from functools import reduce
from itertools import product
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import CollectiveCounter, assert_trees_close, count_collectives
from tests.support.models import awkward
from tests.support.ranks import Ranks, gloo, rows_of, simulated

NUM_MICROBATCHES, LENGTH = 3, 5
AXES: list[dict[str, int]] = [{"shard": 2}, {"replicate": 2, "shard": 2}]
COUNTS = [[5, 0, 3], [0, 0, 0], [1, 4, 2], [0, 5, 5]]  # tokens of each rank and microbatch
# One scatter_grads of whole gradients in the end; a reduction for each microbatch; one over shards, and over replicas
# in the end.
WAYS = ("full gradients", "shards", "shards within replicas")


def drawn(num_ranks: int, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    """For each rank, tokens of ``NUM_MICROBATCHES``, and how many of them there are: all for a mean over ranks."""
    generator = torch.Generator().manual_seed(5)
    shape = num_ranks, NUM_MICROBATCHES, LENGTH
    x, y = (torch.randn(*shape, n, dtype=torch.float64, generator=generator) for n in (5, 3))
    return x, y, torch.tensor(COUNTS[:num_ranks]) if reduction == "sum" else torch.full(shape[:2], LENGTH)


def at_once(num_ranks: int, reduction: str) -> dict[str, Tensor]:
    """A single process: the gradient of the mean over the tokens that are there."""
    model, (x, y, counts) = awkward(), drawn(num_ranks, reduction)
    there = torch.arange(LENGTH) < counts[..., None]
    loss = (model(x[there]) - y[there]).square().sum(-1).mean()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(trainable, torch.autograd.grad(loss, list(trainable.values())), strict=True))


def accumulated(
    mesh: fs.Mesh, way: str, reduction: Any, cut: bool
) -> tuple[dict[str, Tensor], list[CollectiveCounter], fs.Layout]:
    """The sum of the gradients of microbatches, and the collectives of each of them and of the end.

    ``reduction="sum"``: of sums over tokens, divided by the tokens of all ranks. ``cut``: leave out what is no token,
    so that ranks compute with unequal shapes, 0 among them (real ranks only).
    """
    model, (*batch, counts) = awkward(), drawn(mesh.size, reduction)
    number = counts.sum() if reduction == "sum" else NUM_MICROBATCHES * LENGTH
    whole = fs.shard(model, fs.plan(model, mesh, reduction=reduction))
    params, frozen = fs.partition(whole)
    apart, _ = fs.partition(fs.Sharded(whole, fs.plan(model, mesh, reduction=reduction, replicate_axis=None)))

    def loss(full: Any, x: Tensor, y: Tensor, count: Tensor) -> Tensor:
        x, y = (rows[: int(count)] if cut else rows for rows in (x, y))
        losses = (functional_call(model, full, (x,)) - y).square().sum(-1)
        return (losses * (torch.arange(len(x)) < count)).sum() / number

    @mesh.spmd
    def one(start: fs.Sharded, frozen: fs.Sharded, *batch: Tensor) -> Any:
        rest = dict(fs.gather(frozen))
        if way == "full gradients":
            return dict(fs.grad(lambda p: loss({**p, **rest}, *batch))(fs.gather(start)))
        return fs.grad(lambda p: loss({**fs.gather(p), **rest}, *batch))(start)

    @mesh.spmd
    def end(total: Any) -> fs.Sharded:
        if way == "full gradients":
            return fs.scatter_grads(total, params.layout)
        if way == "shards within replicas" and "replicate" in mesh.axes:
            combine = fs.collectives.pmean if reduction == "mean" else fs.collectives.psum
            total = combine(total, mesh["replicate"])
        return fs.Sharded(total, params.layout)

    dim, parts, counters = len(mesh.axes) if mesh.is_simulated else 0, [], []
    start = apart if way == "shards within replicas" else params
    for i in range(NUM_MICROBATCHES):
        with count_collectives() as seen:
            parts.append(one(start, frozen, *(x.select(dim, i) for x in rows_of(mesh, (*batch, counts)))))
        counters.append(seen)
    total: Any = reduce(lambda one, two: optree.tree_map(torch.add, one, two), parts)
    with count_collectives() as seen:
        grads = end(total)
    return fs.gather(grads, lazy=False), [*counters, seen], params.layout


MESHES = [*simulated(*AXES, {"shard": 4}, {"shard": 2, "replicate": 2}), *gloo(*AXES)]
every_way = pytest.mark.parametrize("way", WAYS)


def assert_reductions(counters: list[CollectiveCounter], layout: fs.Layout, way: str) -> None:
    """None before the end, or one of each buffer for each microbatch; over replicas with them, or in the end."""
    *microbatches, end = ({k: n for k, n in seen.by_kind.items() if k != "all_gather"} for seen in counters)
    num = len(layout.buffers)
    inside = {"psum_scatter": num}
    across = {"psum": num} if layout.axis_size("replicate") > 1 else {}
    expected = {
        "full gradients": ({}, inside | across),
        "shards": (inside | across, {}),
        "shards within replicas": (inside, across),
    }
    assert (microbatches, end) == ([expected[way][0]] * NUM_MICROBATCHES, expected[way][1])
    assert counters[-1]["all_gather"] == 0
    for one in (one for seen in counters for one in seen.issued if one.kind == "psum"):
        assert one.axis == "replicate"
        assert one.numel in {buffer.shard_numel for buffer in layout.buffers.values()}


def assert_at_once(ranks: Ranks, way: str, reduction: str, cut: bool = False) -> None:
    expected = at_once(ranks.size, reduction)
    assert all(grad.any() for grad in expected.values() if grad.numel())
    for grads, counters, layout in ranks.run(accumulated, way, reduction, cut):
        assert_trees_close(grads, expected, rtol=1e-10, atol=1e-12)
        assert_reductions(counters, layout, way)


@pytest.mark.parametrize("ranks", [*MESHES, *simulated({"replicate": 2, "shard": 4})], ids=str)
@every_way
def test_accumulated_gradients_are_those_of_the_big_batch(way: str, ranks: Ranks) -> None:
    assert_at_once(ranks, way, "mean")


@pytest.mark.parametrize(("ranks", "cut"), [*product(MESHES, [False]), *product(gloo(*AXES), [True])], ids=str)
@every_way
def test_losses_weighted_by_tokens_are_those_of_a_single_process(way: str, ranks: Ranks, cut: bool) -> None:
    """Real ranks also where those with unequal numbers of tokens compute with tensors of unequal shapes."""
    assert_at_once(ranks, way, "sum", cut)
