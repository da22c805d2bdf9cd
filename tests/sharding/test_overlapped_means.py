"""The order that the means of reductions are started in, and how many at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from functorch_shard.communication.backend import Work
from functorch_shard.sharding.overlapped_means import UNDER_WAY, Means


class Ranks:
    """Stands for the ranks: twice a sum is its mean."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, i: int, total: Tensor) -> Work:
        self.events.append(f"{i}")

        def finish() -> Tensor:
            self.events.append(f"{i} done")
            return 2 * total

        return Work(finish)

    @property
    def started(self) -> list[int]:
        return [int(event) for event in self.events if not event.endswith("done")]


def started_by(order: Sequence[int], reduced: Sequence[int]) -> list[int]:
    ranks = Ranks()
    means = Means(order, ranks.start, set())
    for i in reduced:
        means.add(i, torch.tensor([float(i)]))
    for i in order:
        found = means.wait(i)
        assert (None if found is None else found.item()) == (None if i not in reduced else i * (1 + (i in means.taken)))
    assert means.taken == {*ranks.started}
    return ranks.started


def test_ranks_start_them_in_one_order_whatever_order_they_reduce_in() -> None:
    assert started_by([4, 3, 2, 1], [4, 3, 2, 1]) == [4, 3, 2, 1]
    assert started_by([4, 3, 2, 1], [1, 4, 2, 3]) == [4, 3, 2, 1]


def test_what_comes_before_one_that_was_not_reduced_is_left_to_the_end() -> None:
    assert started_by([4, 3, 2, 1], [4, 2, 1]) == [4]
    assert started_by([4, 3, 2, 1], [3, 1]) == []
    assert started_by([], []) == []


def test_what_was_left_to_the_end_is_not_started_by_another_gather() -> None:
    ranks = Ranks()
    means = Means([4, 3, 2], ranks.start, set())
    means.add(3, torch.ones(1))
    assert means.wait(3) == 1
    means.add(4, torch.ones(1))
    means.add(2, torch.ones(1))
    assert [means.wait(i) for i in (4, 2)] == [2, 1]
    assert ranks.started == [4]


def test_each_starts_as_soon_as_those_before_it_have_and_a_few_are_under_way_at_a_time() -> None:
    ranks = Ranks()
    means = Means([4, 3, 2, 1], ranks.start, set())
    means.add(3, torch.ones(1))
    assert ranks.events == []
    means.add(4, torch.ones(1))
    assert ranks.events == ["4", "3"]
    means.add(2, torch.ones(1))
    assert ranks.events == ["4", "3", "4 done", "2"]
    assert UNDER_WAY == 2
