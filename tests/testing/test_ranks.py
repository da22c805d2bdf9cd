"""One body on simulated and on real ranks returns the same on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import HYBRID, Ranks, gloo, on_each


@pytest.mark.parametrize("x", [1, 2, 3])
@pytest.mark.parametrize(("y", "z"), [(0, 0), (0, 1)])
def test_this_test_has_each_row_of_one_parametrize_and_each_value_of_another(
    request: pytest.FixtureRequest, x: int, y: int, z: int
) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    assert slow == ((x, z) not in {(1, 0), (2, 1), (3, 0)})


SOURCE = {"w": torch.arange(5.0), "b": torch.tensor([7.0, 8.0])}


def body(mesh: fs.Mesh) -> dict[str, Any]:
    params = fs.shard(SOURCE, fs.plan(SOURCE, mesh, align_bytes=0))
    mine = mesh.split(torch.arange(2 * mesh.size))
    total = mesh.spmd(lambda x: fs.collectives.psum(x, mesh))(mine)
    whole = fs.gather(params, lazy=False)
    return {"shards": dict(params), "mine": mine, "of all": [total, None], "whole": whole, "axes": mesh.axes}


@pytest.mark.parametrize("ranks", gloo(1, 3, HYBRID, {"shard": 2, "replicate": 2}), ids=str)
def test_ranks_count_in_row_major_order_on_both(ranks: Ranks) -> None:
    results = ranks.run(body)
    assert_trees_close(results, ranks.simulated.run(body), rtol=0, atol=0)
    assert [result["mine"].tolist() for result in results] == [[2 * rank, 2 * rank + 1] for rank in range(ranks.size)]


@on_each([])
def fails(mesh: fs.Mesh) -> None:
    assert mesh.size == 3, f"{mesh.axes}"


def test_the_asserts_of_a_body_count_on_every_kind(ranks: Ranks) -> None:
    if ranks.size == 3:
        fails(ranks)
    else:
        with pytest.raises(AssertionError, match=str(ranks.axes["shard"])):
            fails(ranks)
