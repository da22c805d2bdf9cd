"""Ranks that use different units: right where all ranks gather the same ones, and an error on every rank elsewhere."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.func import functional_call

import functorch_shard as fs
from tests.support.different_units import LARGE, SMALL, Units, alternately, assert_trained, inputs_of, train
from tests.support.differentiated import by_backward
from tests.support.ranks import HYBRID, Ranks, gloo
from tests.support.refusals import text_of


def one_each(rank: int, step: int) -> list[int]:
    return [0, 1 + rank, 4]


def other_way_round(rank: int, step: int) -> list[int]:
    return [0, 1, 2, 3, 4] if (rank + step) % 2 else [4, 2, 1]


def none_on_one_rank(rank: int, step: int) -> list[int]:
    return [] if rank == step % 2 else [1, 3]


EAGER = {"uses one each": one_each, "another order": other_way_round, "one rank uses nothing": none_on_one_rank}


@pytest.mark.parametrize("ranks", gloo(2, 3, HYBRID, {"replicate": 2}), ids=str)
def test_gathered_at_once_ranks_may_use_any_units(ranks: Ranks) -> None:
    for uses in EAGER.values():
        program = 6, SMALL, uses, 3
        for ignored in ([], ["units.1.bias"]):  # a unit of which a part is whole on every rank
            trained = partial(train, lazy=False, ignored=ignored)
            assert_trained(ranks.run(trained, *program), *program)


@pytest.mark.parametrize("ranks", gloo(2, 3), ids=str)
def test_two_units_of_which_one_rank_uses_the_second_train_as_in_one_process(ranks: Ranks) -> None:
    for width, reshard in product((SMALL, LARGE), (True, False)):
        program = 2, width, alternately, 4
        assert_trained(ranks.run(partial(train, reshard_after_forward=reshard), *program), *program)


@pytest.mark.parametrize("ranks", gloo(2, 3), ids=str)
def test_lazily_gathered_units_of_one_size_are_never_taken_for_each_other(ranks: Ranks) -> None:
    """Also where their messages lie in shared memory."""
    text, *others = ranks.run(partial(text_of, train), 6, LARGE, one_each, 3)
    assert text.startswith("RuntimeError: ")
    assert others == [text] * (ranks.size - 1)
    lines = text.splitlines()
    for rank in range(ranks.size):
        assert any(line.startswith(f"  rank {rank}: ") and " for 'units." in line for line in lines), text
    assert "gather with lazy=False" in lines[-1]


def backward_by_another_unit(mesh: fs.Mesh, dtype: Any) -> None:
    model, x = Units(2, SMALL), inputs_of(SMALL, mesh.rank, 0).to(dtype or torch.float64)
    forward = lambda full: functional_call(model, full, (x, [mesh.rank % 2]))  # noqa: E731
    params = fs.shard(model, fs.plan(model, mesh))
    by_backward(lambda p: forward(fs.gather(p, lazy=False, dtype=dtype)))(params)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("ranks", gloo(2, {"replicate": 2}, HYBRID), ids=str)
def test_gradients_of_one_size_are_never_taken_for_each_other_by_backward(ranks: Ranks, dtype: Any) -> None:
    """What was gathered at once is reduced where backward comes to it: of another unit on each rank."""
    for text in ranks.run(partial(text_of, backward_by_another_unit), dtype):
        assert text.startswith("RuntimeError: ")
        assert " for 'units.0'" in text, text
        assert " for 'units.1'" in text, text
