"""Owners are chosen by work, within the bound of their rule, and rounds by size."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functorch_shard as fs
from functorch_shard.matrix.plan import ROUND, assign, owners_of, rounds_of

COSTS = st.lists(st.integers(0, 100), max_size=7)


def work(costs: list[int], owners: list[int], num_ranks: int) -> list[int]:
    return [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(num_ranks)]


@given(COSTS, st.integers(1, 4))
@settings(deadline=None)
def test_the_most_work_of_a_rank_is_within_grahams_bound_of_the_best(costs: list[int], num_ranks: int) -> None:
    best = min(max(work(costs, list(each), num_ranks)) for each in product(range(num_ranks), repeat=len(costs)))
    assert (
        3 * num_ranks * max(work(costs, assign(costs, num_ranks, [[0] * num_ranks] * len(costs)), num_ranks))
        <= (4 * num_ranks - 1) * best
    )


def test_of_ranks_with_equal_work_the_one_that_has_most_of_a_parameter_updates_it() -> None:
    assert assign([5, 5, 5], 3, [[0, 0, 9], [1, 0, 8], [0, 7, 0]]) == [2, 0, 1]


def test_a_round_ends_when_an_owner_has_enough_and_costs_in_it_are_similar() -> None:
    side = int((ROUND / 4) ** 0.5)
    tree = {f"{i}.w": torch.empty(side, side * (1 + i % 2), device="meta") for i in range(8)}
    layout = fs.plan(tree, fs.simulated_mesh(2))
    rounds = rounds_of(layout.num_shards, layout.buffers, owners_of(layout.num_shards, layout.buffers))
    shapes = [{layout.slots[name].shape for names in each.owned for name in names} for each in rounds]
    assert shapes == [{(side, 2 * side)}, {(side, 2 * side)}, {(side, side)}, {(side, side)}]
