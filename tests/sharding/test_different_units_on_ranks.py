"""Ranks that use different units: right where all ranks gather the same ones, and an error on every rank elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import functorch_shard as fs
from tests.support.different_units import LARGE, SMALL, Units, Uses, alternately, assert_trained, inputs_of, train
from tests.support.pool import run_ranks
from tests.support.refusals import text_of


def one_each(rank: int, step: int) -> list[int]:
    return [0, 1 + rank, 4]


def other_way_round(rank: int, step: int) -> list[int]:
    return [0, 1, 2, 3, 4] if (rank + step) % 2 else [4, 2, 1]


def none_on_one_rank(rank: int, step: int) -> list[int]:
    return [] if rank == step % 2 else [1, 3]


def all_trained_on_this_rank(axes: dict[str, int], programs: list[Any], **options: Any) -> list[dict[str, Tensor]]:
    mesh = fs.init_mesh(axes)
    return [train(mesh, *program, **options) for program in programs]


EAGER = {"uses one each": one_each, "another order": other_way_round, "one rank uses nothing": none_on_one_rank}


def assert_all_trained(axes: dict[str, int], programs: list[Any], **options: Any) -> None:
    results = run_ranks(all_trained_on_this_rank, fs.simulated_mesh(axes).size, axes, programs, **options)
    for program, of_ranks in zip(programs, zip(*results, strict=True), strict=True):
        assert_trained(list(of_ranks), *program)


@pytest.mark.parametrize("axes", [{"shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 2}, {"replicate": 2}], ids=str)
def test_gathered_at_once_ranks_may_use_any_units(axes: dict[str, int]) -> None:
    assert_all_trained(axes, [(6, SMALL, uses, 3) for uses in EAGER.values()], lazy=False)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_two_units_of_which_one_rank_uses_the_second_train_as_in_one_process(num_ranks: int) -> None:
    programs = [(2, width, alternately, 4) for width in (SMALL, LARGE)]
    for reshard in (True, False):
        assert_all_trained({"shard": num_ranks}, programs, reshard_after_forward=reshard)


def refused_on_this_rank(lazy: bool | None, uses: Uses) -> str:
    return text_of(lambda mesh: train(mesh, 6, LARGE, uses, 3, lazy), fs.init_mesh())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_lazily_gathered_units_of_one_size_are_never_taken_for_each_other(num_ranks: int) -> None:
    """Also where their messages lie in shared memory."""
    text, *others = run_ranks(refused_on_this_rank, num_ranks, None, one_each)
    assert text.startswith("RuntimeError: ")
    assert others == [text] * (num_ranks - 1)
    lines = text.splitlines()
    for rank in range(num_ranks):
        assert any(line.startswith(f"  rank {rank}: ") and " for 'units." in line for line in lines), text
    assert "gather with lazy=False" in lines[-1]


def by_backward_on_this_rank(axes: dict[str, int], dtype: Any) -> str:
    def step(mesh: fs.Mesh) -> None:
        model = Units(2, SMALL)
        params = fs.shard(model, fs.plan(model, mesh))
        leaves = fs.Sharded({key: x.requires_grad_() for key, x in params.items()}, params.layout)
        full = fs.gather(leaves, lazy=False, dtype=dtype)
        x = inputs_of(SMALL, mesh.rank, 0).to(dtype or torch.float64)
        functional_call(model, full, (x, [mesh.rank % 2])).backward()

    return text_of(step, fs.init_mesh(axes))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_gradients_of_one_size_are_never_taken_for_each_other_by_backward(axes: dict[str, int], dtype: Any) -> None:
    """What was gathered at once is reduced where backward comes to it: of another unit on each rank."""
    results = run_ranks(by_backward_on_this_rank, fs.simulated_mesh(axes).size, axes, dtype)
    for text in results:
        assert text.startswith("RuntimeError: ")
        assert " for 'units.0'" in text, text
        assert " for 'units.1'" in text, text
