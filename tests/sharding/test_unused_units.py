"""The reductions that a rank owes the others: the same ones in the same order, whatever backward comes to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest.mock import patch

import functorch_shard.sharding.unused
from functorch_shard.collectives.sinks import sink_here
from functorch_shard.sharding.unused import Owed
from functorch_shard.training.boundary import new_boundary


class Node:
    """Stands for a node of autograd."""


def reduced(gathered: Sequence[str], used: Sequence[str], passes: int = 1) -> list[list[str]]:
    """What a rank reduces in each pass, zeros in capitals, when backward comes to the parts ``used``, in that order."""
    owed, nodes = Owed(), {part: Node() for part in gathered}
    for part in gathered:
        owed.gather(part)
        owed.expect(part, nodes[part])
    to_come, seen = {id(nodes[part]) for part in used}, []
    with patch.object(functorch_shard.sharding.unused, "backward_comes_to", lambda node: id(node) in to_come):
        for number in range(passes):
            order = [each for part in used for each in (*map(str.upper, owed.before(part, number)), part)]
            seen.append([*order, *map(str.upper, owed.rest(number))])
    return seen


def test_what_is_used_in_order_has_nothing_before_it_and_what_is_not_comes_in_its_place() -> None:
    assert reduced("abcd", "dcba") == [[*"dcba"]]
    assert reduced("abcd", "da", passes=2) == [[*"dCBa"]] * 2
    assert reduced("abcd", "") == [[*"DCBA"]]
    assert reduced("abcd", "b") == [[*"DCbA"]]


def test_what_comes_later_is_waited_for_in_no_place() -> None:
    assert reduced("abcd", "acd") == [[*"Bacd"]]


def test_ranks_that_use_any_parts_in_the_order_of_gathering_reduce_alike() -> None:
    rng = random.Random(0)
    for _ in range(100):
        gathered = [str(i) for i in range(rng.randint(1, 9))]
        last_first = gathered[::-1]
        used = [part for part in last_first if rng.random() < 0.6]
        (order,) = reduced([f"p{part}" for part in gathered], [f"p{part}" for part in used])
        assert [part.lower() for part in order] == [f"p{part}" for part in last_first]


def test_anchors_are_put_where_the_nearest_boundary_is_and_nowhere_else() -> None:
    assert sink_here().anchors is None
    with new_boundary() as outer:
        with new_boundary() as inner:
            assert sink_here().anchors is inner.anchors is not outer.anchors
        assert sink_here().anchors is outer.anchors
    assert sink_here().anchors is None
