"""The order that the means of reductions are started in, and how many at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from functorch_shard.communication.work import Work
from functorch_shard.sharding.overlapped_means import UNDER_WAY, Means


class Ranks:
    """Stands for the ranks: twice a sum is its mean, and a buffer without one counts as ``[0]``."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, key: str, total: Tensor | None) -> Work:
        self.events.append(key if total is not None else key.upper())

        def finish() -> Tensor:
            self.events.append(f"{key} done")
            return torch.zeros(1) if total is None else 2 * total

        return Work(finish)

    @property
    def started(self) -> list[str]:
        return [event for event in self.events if not event.endswith("done")]


def events_of(order: str, reduced: Sequence[str]) -> Ranks:
    ranks = Ranks()
    means = Means(dict.fromkeys(order, 0), ranks.start)
    for key in reduced:
        means.add(key, torch.tensor([float(ord(key))]))
    for key in order:
        expected = 2.0 * ord(key) if key in reduced else 0.0
        assert means.wait(key).item() == expected
    return ranks


def test_ranks_start_them_in_one_order_whatever_order_they_reduce_in() -> None:
    assert events_of("dcba", "dcba").started == [*"dcba"]
    assert events_of("dcba", "adbc").started == [*"dcba"]


def test_what_was_not_reduced_counts_as_zeros_in_its_place() -> None:
    assert events_of("dcba", "ca").started == [*"DcBa"]
    assert events_of("dcba", "").started == [*"DCBA"]


def test_each_starts_as_soon_as_those_before_it_have_and_a_few_are_under_way_at_a_time() -> None:
    ranks = Ranks()
    means = Means(dict.fromkeys("dcba", 0), ranks.start)
    means.add("c", torch.ones(1))
    assert ranks.events == []
    means.add("d", torch.ones(1))
    assert ranks.events == ["d", "c"]
    means.add("b", torch.ones(1))
    assert ranks.events == ["d", "c", "d done", "b"]
    assert UNDER_WAY == 2


def test_of_no_buffers_nothing_is_started() -> None:
    assert events_of("", "").events == []
