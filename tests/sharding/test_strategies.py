"""The strategies of FSDP by their names, on simulated and on gloo ranks: every collective of a step.

Gradients of the same meshes and options are in tests/laws.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import CollectiveCounter, count_collectives
from tests.support.models import awkward, loss_of
from tests.support.ranks import HYBRID, Ranks, gloo, simulated

NUMBERS, COPIES = [*simulated(8), *gloo(4)], [*simulated({"replicate": 4}), *gloo({"replicate": 4})]
GRIDS = [*simulated({"replicate": 2, "shard": 4}), *gloo({"shard": 2, "replicate": 2}, HYBRID)]
STRATEGIES: dict[str, tuple[list[Ranks], bool]] = {  # ranks, and reshard_after_forward
    "FULL_SHARD": (NUMBERS, True),
    "SHARD_GRAD_OP": (NUMBERS, False),
    "NO_SHARD": (COPIES, True),
    "HYBRID_SHARD": (GRIDS, True),
    "_HYBRID_SHARD_ZERO2": (GRIDS, False),
}


def step(mesh: fs.Mesh, reshard: bool) -> tuple[CollectiveCounter, fs.Layout]:
    model = awkward()
    params = fs.shard(model, fs.plan(model, mesh, reshard_after_forward=reshard))
    batch = mesh.split(tuple(torch.randn(2 * mesh.size, n, dtype=torch.float64) for n in (5, 3)))
    gradients = mesh.spmd(fs.grad(lambda p, x, y: loss_of(model, fs.gather(p), x, y)))
    with count_collectives() as seen:
        gradients(params, *batch)
    return seen, params.layout


def once(kind: str, axis: str, buffers: list[Any], *, shards: bool) -> Counter[tuple[str, str, int]]:
    """One collective for each buffer, on shards of it or on the whole: its kind, its axis, bytes of one rank."""
    return Counter((kind, axis, (b.shard_numel if shards else b.numel) * b.dtype.itemsize) for b in buffers)


@pytest.mark.parametrize(
    ("strategy", "ranks"), [(name, ranks) for name, (kinds, _) in STRATEGIES.items() for ranks in kinds], ids=str
)
def test_a_strategy_gathers_reduces_inside_and_all_reduces_across(strategy: str, ranks: Ranks) -> None:
    reshard = STRATEGIES[strategy][1]
    for seen, layout in ranks.run(step, reshard):
        traffic = Counter((one.kind, one.axis, one.nbytes) for one in seen.issued)
        buffers, sharded = [*layout.buffers.values()], layout.num_shards > 1
        trained = [buffer for buffer in buffers if buffer.trainable]
        assert (layout.reshard_after_forward, sharded) == (reshard, strategy != "NO_SHARD")
        gathers = once("all_gather", "shard", buffers, shards=True) if sharded else Counter()
        inside = once("psum_scatter", "shard", trained, shards=False) if sharded else Counter()
        across = once("psum", "replicate", trained, shards=True) if "replicate" in ranks.axes else Counter()
        gathered = Counter({one: count for one, count in traffic.items() if one[0] == "all_gather"})
        assert traffic - gathered == inside + across  # NO_SHARD, as DDP: an all-reduce, and no gather
        if ranks.real and reshard and sharded:  # some of them again in backward
            assert gathered.keys() == gathers.keys()
        else:
            assert gathered == gathers
        places = [(one.kind, one.numel) for one in seen.issued]
        for buffer in trained if inside and across else ():
            assert places.index(("psum_scatter", buffer.numel)) < places.index(("psum", buffer.shard_numel))
