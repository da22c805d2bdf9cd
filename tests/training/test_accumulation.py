"""Accumulation, with a reduction at the end or with one for each microbatch: the gradient of the big batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import product
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import CollectiveCounter, assert_trees_close, count_collectives
from tests.support.models import awkward, loss_of, two_layers
from tests.support.ranks import Ranks, gloo, rows_of, simulated

NUM_MICROBATCHES, LENGTH = 3, 5
AXES: list[dict[str, int]] = [{"shard": 2}, {"replicate": 2, "shard": 2}]
COUNTS = [[5, 0, 3], [0, 0, 0], [1, 4, 2], [0, 5, 5]]  # tokens of each rank and microbatch
Grads = dict[str, Tensor]


def samples(num_ranks: int) -> tuple[Tensor, Tensor]:
    """For each rank, ``NUM_MICROBATCHES`` of two samples."""
    generator = torch.Generator().manual_seed(5)

    def draw(n: int) -> Tensor:
        return torch.randn(num_ranks, NUM_MICROBATCHES, 2, n, dtype=torch.float64, generator=generator)

    return draw(5), draw(3)


def big_batch(num_ranks: int) -> Grads:
    model = awkward()
    x, y = (rows.flatten(0, 2) for rows in samples(num_ranks))
    return gradients_of(model, (model(x) - y).square().mean())


def gradients_of(model: nn.Module, loss: Tensor) -> Grads:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(trainable, torch.autograd.grad(loss, list(trainable.values())), strict=True))


def added(trees: list[Any]) -> Any:
    return reduce(lambda one, two: optree.tree_map(torch.add, one, two), trees)


def each_microbatch(mesh: fs.Mesh, one: Callable[[Tensor, Tensor], Any]) -> tuple[list[Any], list[CollectiveCounter]]:
    """What ``one`` makes of each microbatch, and the collectives that it takes."""
    x, y = rows_of(mesh, samples(mesh.size))
    dim, parts, counters = len(mesh.axes) if mesh.is_simulated else 0, [], []
    for i in range(NUM_MICROBATCHES):
        with count_collectives() as seen:
            parts.append(one(x.select(dim, i), y.select(dim, i)))
        counters.append(seen)
    return parts, counters


def full_gradients_added(mesh: fs.Mesh) -> tuple[Grads, list[CollectiveCounter], fs.Layout]:
    """One ``scatter_grads`` in the end: whole gradients, and the collectives of each microbatch and of the end."""
    model = awkward()
    params, frozen = fs.partition(fs.shard(model, fs.plan(model, mesh)))

    @mesh.spmd
    def one(params: fs.Sharded, frozen: fs.Sharded, x: Tensor, y: Tensor) -> Grads:
        rest = fs.gather(frozen)
        return dict(fs.grad(lambda p: loss_of(model, {**p, **rest}, x, y) / NUM_MICROBATCHES)(fs.gather(params)))

    parts, counters = each_microbatch(mesh, lambda x, y: one(params, frozen, x, y))
    with count_collectives() as seen:
        grads = mesh.spmd(lambda total: fs.scatter_grads(total, params.layout))(added(parts))
    return fs.gather(grads, lazy=False), [*counters, seen], params.layout


def shards_added(mesh: fs.Mesh) -> tuple[Grads, list[CollectiveCounter], fs.Layout]:
    """A reduction for each microbatch, and no memory for whole gradients; nothing is sent in the end."""
    model = awkward()
    params, frozen = fs.partition(fs.shard(model, fs.plan(model, mesh)))

    @mesh.spmd
    def one(params: fs.Sharded, frozen: fs.Sharded, x: Tensor, y: Tensor) -> fs.Sharded:
        return fs.grad(lambda p: loss_of(model, fs.gather(p, frozen), x, y) / NUM_MICROBATCHES)(params)

    parts, counters = each_microbatch(mesh, lambda x, y: one(params, frozen, x, y))
    with count_collectives() as seen:
        total = added(parts)
    return fs.gather(total, lazy=False), [*counters, seen], params.layout


def shards_added_within_replicas(mesh: fs.Mesh) -> tuple[Grads, list[CollectiveCounter], fs.Layout]:
    """A reduction over shards for each microbatch, and one over replicas in the end."""
    model = awkward()
    whole = fs.shard(model, fs.plan(model, mesh))
    params, frozen = fs.partition(whole)
    apart, _ = fs.partition(fs.Sharded(whole, fs.plan(model, mesh, replicate_axis=None)))

    @mesh.spmd
    def one(params: fs.Sharded, frozen: fs.Sharded, x: Tensor, y: Tensor) -> fs.Sharded:
        rest = dict(fs.gather(frozen))
        return fs.grad(lambda p: loss_of(model, {**fs.gather(p), **rest}, x, y) / NUM_MICROBATCHES)(params)

    parts, counters = each_microbatch(mesh, lambda x, y: one(apart, frozen, x, y))
    with count_collectives() as seen:
        total = mesh.spmd(lambda total: over_replicas(total, params.layout))(added(parts))
    return fs.gather(total, lazy=False), [*counters, seen], params.layout


def over_replicas(total: fs.Sharded, layout: fs.Layout) -> fs.Sharded:
    """The gradients of a layout with ``replicate_axis=None``, reduced over replicas too."""
    reduce = fs.collectives.pmean if layout.reduction == "mean" else fs.collectives.psum
    reduced = reduce(total, layout.mesh["replicate"]) if "replicate" in layout.mesh.axes else total
    return fs.Sharded(reduced, layout)


WAYS: dict[str, Callable[[fs.Mesh], tuple[Grads, list[CollectiveCounter], fs.Layout]]] = {
    "full gradients": full_gradients_added,
    "shards": shards_added,
    "shards within replicas": shards_added_within_replicas,
}


def tokens(num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each rank and microbatch: inputs, targets, and how many of them are there. Rank 1 has none at all."""
    generator = torch.Generator().manual_seed(6)
    shape = len(COUNTS), NUM_MICROBATCHES, LENGTH
    x, y = (torch.randn(*shape, n, dtype=torch.float64, generator=generator)[:num_ranks] for n in (5, 3))
    return x, y, torch.tensor(COUNTS[:num_ranks])


def all_tokens_at_once(num_ranks: int) -> tuple[Grads, Tensor]:
    """A single process: the mean over the tokens that are there."""
    model, (x, y, counts) = two_layers().double(), tokens(num_ranks)
    there = torch.arange(LENGTH) < counts[..., None]
    loss = (model(x[there]) - y[there]).square().sum(-1).mean()
    return gradients_of(model, loss), loss.detach()


def loss_sum(model: nn.Module, parameters: Any, x: Tensor, y: Tensor, count: Tensor | int) -> Tensor:
    """The sum over this rank's tokens; what is behind the last of them counts nothing."""
    losses = (functional_call(model, dict(parameters), (x,)) - y).square().sum(-1)
    return (losses * (torch.arange(len(x)) < count)).sum()


def weighted_by_tokens(mesh: fs.Mesh, way: str, cut: bool = False) -> tuple[Grads, Tensor]:
    """``reduction="sum"`` of sums over tokens, divided by the tokens of all ranks and microbatches.

    ``cut``: leave out what is no token, so that ranks compute with unequal shapes, 0 among them (real ranks only).
    """
    model = two_layers().double()
    params = fs.shard(model, fs.plan(model, mesh, reduction="sum"))
    apart = fs.plan(model, mesh, reduction="sum", replicate_axis=None)

    @mesh.spmd
    def gradients(params: fs.Sharded, x: Tensor, y: Tensor, counts: Tensor) -> tuple[fs.Sharded, Tensor]:
        total = fs.collectives.psum(counts.sum(), mesh)

        def loss(parameters: Any, i: int) -> Tensor:
            end = int(counts[i]) if cut else LENGTH
            return loss_sum(model, parameters, x[i, :end], y[i, :end], counts[i]) / total

        if way != "full gradients":
            start = params if way == "shards" else fs.Sharded(params, apart)
            results = [fs.grad_and_value(lambda p, i: loss(fs.gather(p), i))(start, i) for i in range(len(x))]
            grads = added([grad for grad, _ in results])
            grads = grads if way == "shards" else over_replicas(grads, params.layout)
        else:
            results = [fs.grad_and_value(loss)(fs.gather(params), i) for i in range(len(x))]
            grads = fs.scatter_grads(added([grad for grad, _ in results]))
        return grads, fs.collectives.psum(torch.stack([value for _, value in results]).sum(), mesh)

    grads, value = gradients(params, *rows_of(mesh, tokens(mesh.size)))
    return fs.gather(grads, lazy=False), value


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
    assert len(microbatches) == NUM_MICROBATCHES
    assert (microbatches, end) == ([expected[way][0]] * NUM_MICROBATCHES, expected[way][1])
    assert counters[-1]["all_gather"] == 0
    for one in (one for seen in counters for one in seen.issued if one.kind == "psum"):
        assert one.axis == "replicate"
        assert one.numel in {buffer.shard_numel for buffer in layout.buffers.values()}


@pytest.mark.parametrize("ranks", [*MESHES, *simulated({"replicate": 2, "shard": 4})], ids=str)
@every_way
def test_accumulated_gradients_are_those_of_the_big_batch(way: str, ranks: Ranks) -> None:
    expected = big_batch(ranks.size)
    assert all(grad.any() for grad in expected.values() if grad.numel())
    for grads, counters, layout in ranks.run(WAYS[way]):
        assert_trees_close(grads, expected, rtol=1e-10, atol=1e-12)
        assert_reductions(counters, layout, way)


@pytest.mark.parametrize(("ranks", "cut"), [*product(MESHES, [False]), *product(gloo(*AXES), [True])], ids=str)
@every_way
def test_losses_weighted_by_tokens_are_those_of_a_single_process(way: str, ranks: Ranks, cut: bool) -> None:
    """Real ranks also where those with unequal numbers of tokens compute with tensors of unequal shapes."""
    expected = all_tokens_at_once(ranks.size)
    assert all(grad.any() for grad in expected[0].values())
    for actual in ranks.run(weighted_by_tokens, way, cut):
        assert_trees_close(actual, expected, rtol=1e-10, atol=1e-12)
