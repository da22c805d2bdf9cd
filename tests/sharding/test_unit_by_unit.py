"""Whole parameters with one unit in memory: lazy parameters, each materialized in turn."""

from __future__ import annotations

from typing import Any

import pytest

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import two_layers
from tests.support.ranks import HYBRID, Ranks, gloo


def iterated(mesh: fs.Mesh) -> Any:
    """What this rank keeps if one of them keeps the parameters, and what is sent for it."""
    model = two_layers()
    params = fs.shard(model, fs.plan(model, mesh))
    with count_collectives() as seen:
        whole = ((name, fs.materialize(x)) for name, x in fs.gather(params).items())
        kept = {name: x for name, x in whole if mesh.rank == 1}
    return kept, dict(seen.by_kind)


@pytest.mark.parametrize("ranks", gloo(2, HYBRID), ids=str)
def test_one_rank_has_the_whole_parameters_and_every_buffer_is_gathered_once(ranks: Ranks) -> None:
    expected = {name: p.detach() for name, p in two_layers().named_parameters()}
    buffers = fs.plan(two_layers(), fs.simulated_mesh(2)).buffers
    for rank, (kept, seen) in enumerate(ranks.run(iterated)):
        assert_trees_close(kept, expected if rank == 1 else {}, rtol=0, atol=0)
        assert seen == {"all_gather": len(buffers)}
