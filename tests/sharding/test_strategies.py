"""The strategies of FSDP by their names, on simulated and on gloo ranks: every collective of a step.

Gradients of the same meshes and options are in tests/laws.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.testing import CollectiveCounter, assert_trees_close, count_collectives
from tests.support.models import awkward, loss_of
from tests.support.ranks import Ranks, gloo, simulated

# kind, axis, bytes of the operand of one rank
Traffic = Counter[tuple[str, str, int]]

SQUARES: list[dict[str, int]] = [{"replicate": 2, "shard": 2}, {"shard": 2, "replicate": 2}]
GRIDS = [*simulated({"replicate": 2, "shard": 4}, SQUARES[1]), *gloo(*SQUARES)]
COPIES = [*simulated({"replicate": 4}), *gloo({"replicate": 4})]
every_grid = pytest.mark.parametrize("ranks", GRIDS, ids=str)
every_number = pytest.mark.parametrize("ranks", [*simulated(8), *gloo(4)], ids=str)
RESHARD = {"HYBRID_SHARD": True, "_HYBRID_SHARD_ZERO2": False}


def samples(num_ranks: int) -> tuple[Tensor, Tensor]:
    """A global batch, in which every rank's part is another."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(2 * num_ranks, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    return x, y


def halves(mesh: fs.Mesh, **options: Any) -> tuple[nn.Module, fs.Sharded, fs.Sharded]:
    model = awkward()
    return model, *fs.partition(fs.shard(model, fs.plan(model, mesh, **options)))


Step = tuple[dict[str, Tensor], CollectiveCounter, fs.Layout, fs.Layout]


def step(mesh: fs.Mesh, options: dict[str, Any]) -> Step:
    """Whole gradients of one step, its collectives, and the layouts of what is trained and what is not."""
    model, params, frozen = halves(mesh, **options)

    @mesh.spmd
    def gradients(params: fs.Sharded, frozen: fs.Sharded, x: Tensor, y: Tensor) -> fs.Sharded:
        return fs.grad(lambda p: loss_of(model, fs.gather(p, frozen), x, y))(params)

    batch = mesh.split(samples(mesh.size))
    with count_collectives() as seen:
        grads = gradients(params, frozen, *batch)
    return fs.gather(grads, lazy=False), seen, params.layout, frozen.layout


def traffic(seen: CollectiveCounter) -> Traffic:
    return Counter((one.kind, one.axis, one.nbytes) for one in seen.issued)


def once(kind: str, axis: str, layout: fs.Layout, *, shards: bool) -> Traffic:
    """One collective for each buffer, on shards of it or on the whole."""
    buffers = layout.buffers.values()
    return Counter((kind, axis, (b.shard_numel if shards else b.numel) * b.dtype.itemsize) for b in buffers)


@cache
def steps(ranks: Ranks, **options: Any) -> list[Step]:
    return ranks.run(step, options)


def assert_traffic(ranks: Ranks, of: Step) -> None:
    """Every buffer is gathered, reduced once inside and its shard all-reduced across."""
    _, seen, trained, frozen = of
    gathers = once("all_gather", "shard", trained, shards=True) + once("all_gather", "shard", frozen, shards=True)
    gathers = gathers if trained.num_shards > 1 else Counter()
    gathered = Counter({one: count for one, count in traffic(seen).items() if one[0] == "all_gather"})
    assert traffic(seen) - gathered == reductions(trained)
    if ranks.real and trained.reshard_after_forward:  # some of them again in backward
        assert gathered.keys() == gathers.keys()
    else:
        assert gathered == gathers


@every_number
def test_full_shard_is_a_mesh_with_the_axis_shard(ranks: Ranks) -> None:
    for one in steps(ranks):
        assert_traffic(ranks, one)


@every_number
def test_shard_grad_op_is_a_plan_that_does_not_reshard_after_forward(ranks: Ranks) -> None:
    for kept, again in zip(steps(ranks, reshard_after_forward=False), steps(ranks), strict=True):
        assert not kept[2].reshard_after_forward
        assert_traffic(ranks, kept)
        assert_trees_close(kept[0], again[0], rtol=0, atol=0)


@pytest.mark.parametrize("ranks", COPIES, ids=str)
def test_no_shard_is_a_mesh_with_the_axis_replicate_only(ranks: Ranks) -> None:
    for one in steps(ranks):
        _, seen, trained, _ = one
        assert all(buffer.num_shards == 1 for buffer in trained.buffers.values())
        assert_traffic(ranks, one)
        assert traffic(seen) == once("psum", "replicate", trained, shards=False)  # DDP: an all-reduce, and no gather


@every_grid
@pytest.mark.parametrize("strategy", RESHARD)
def test_hybrid_shard_reduces_inside_and_all_reduces_the_shard_across(strategy: str, ranks: Ranks) -> None:
    """``HYBRID_SHARD`` and ``_HYBRID_SHARD_ZERO2``: both axes, in either order."""
    for one in steps(ranks, reshard_after_forward=RESHARD[strategy]):
        _, seen, trained, _ = one
        assert_traffic(ranks, one)
        for key, buffer in trained.buffers.items():  # and in this order
            assert first(seen, "psum_scatter", buffer.numel) < first(seen, "psum", buffer.shard_numel), key


def first(seen: CollectiveCounter, kind: str, numel: int) -> int:
    return [(one.kind, one.numel) for one in seen.issued].index((kind, numel))


def reductions(trained: fs.Layout) -> Traffic:
    """What one ``scatter_grads`` costs."""
    across = once("psum", "replicate", trained, shards=True) if trained.axis_size("replicate") > 1 else Counter()
    return across + (once("psum_scatter", "shard", trained, shards=False) if trained.num_shards > 1 else Counter())
