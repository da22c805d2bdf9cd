"""One body on simulated and on real ranks returns the same on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import HYBRID, Ranks, gloo, on_each, simulated


@pytest.mark.parametrize("x", [1, 2, 3])
@pytest.mark.parametrize(("y", "z"), [(0, 0), (0, 1)])
def test_this_test_has_each_row_of_one_parametrize_and_each_value_of_another(
    request: pytest.FixtureRequest, x: int, y: int, z: int
) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    assert slow == ((x, z) not in {(1, 0), (2, 1), (3, 0)})


SOURCE = {"w": torch.arange(5.0), "b": torch.tensor([7.0, 8.0])}


def body(mesh: fs.Mesh, factor: int) -> dict[str, Any]:
    params = fs.shard(SOURCE, fs.plan(SOURCE, mesh, align_bytes=0))
    mine = mesh.split(torch.arange(2 * mesh.size))
    total = mesh.spmd(lambda x: fs.collectives.psum(x, mesh))(mine)
    whole = fs.gather(params, lazy=False)
    return {"shards": dict(params), "mine": factor * mine, "of all": [total, None], "whole": whole, "axes": mesh.axes}


def test_each_rank_has_what_is_its_own_and_what_all_have(ranks: Ranks) -> None:
    results = ranks.run(body, 10)
    assert len(results) == ranks.size
    total = torch.arange(2 * ranks.size).view(-1, 2).sum(0)
    for rank, result in enumerate(results):
        assert result["mine"].tolist() == [20 * rank, 20 * rank + 10]
        assert_trees_close(result["of all"], [total, None])
        assert_trees_close(dict(result["whole"]), SOURCE)
        assert result["axes"] == ranks.axes


@pytest.mark.parametrize("ranks", gloo(1, 3, HYBRID, {"shard": 2, "replicate": 2}), ids=str)
def test_ranks_count_in_row_major_order_on_both(ranks: Ranks) -> None:
    assert_trees_close(ranks.run(body, 1), ranks.simulated.run(body, 1), rtol=0, atol=0)


@on_each([])
def fails(mesh: fs.Mesh) -> None:
    assert mesh.size == 3, f"{mesh.axes}"


def test_the_asserts_of_a_body_count_on_every_kind(ranks: Ranks) -> None:
    if ranks.size == 3:
        fails(ranks)
    else:
        with pytest.raises(AssertionError, match=str(ranks.axes["shard"])):
            fails(ranks)


drawn: list[int] = []


def counted(mesh: fs.Mesh, value: int) -> int:
    drawn.append(value)
    return value + mesh.size


def test_a_body_whose_results_are_shared_runs_once_for_its_ranks_and_arguments() -> None:
    two, three = simulated(2, 3)
    assert [two.once(counted, 1), two.once(counted, 1), two.once(counted, 2), three.once(counted, 1)] == [
        *([3, 3], [3, 3], [4, 4], [4, 4, 4])
    ]
    assert drawn == [1, 2, 1]
