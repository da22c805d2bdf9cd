"""One digest on any number of ranks, and what the sums cost."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks, gloo, sequential
from tests.virtual.programs import OPTIMIZERS, train

ONE = Ranks({"shard": 1}, "gloo")
SEVERAL = [
    *gloo(2, 3, 6, {"replicate": 2, "shard": 3}, {"replicate": 3}),
    *sequential(2, 6, {"replicate": 2, "shard": 3}),
]
WHOLE = (("ignored", ("head",)), ("reduction", "sum"))


@pytest.mark.parametrize("ranks", SEVERAL, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_has_the_same_bits_on_any_number_of_ranks(ranks: Ranks, optimizer: str) -> None:
    assert {*ranks.once(train, optimizer)} == {*ONE.once(train, optimizer)}


@pytest.mark.parametrize("ranks", SEVERAL, ids=str)
def test_so_it_has_with_parameters_that_are_whole_on_every_rank(ranks: Ranks) -> None:
    assert {*ranks.once(train, "AdamW", 2, 6, WHOLE)} == {*ONE.once(train, "AdamW", 2, 6, WHOLE)}
