"""Ten steps of SGD with momentum: every gradient is that of a plain loop over ranks, and of live ``fully_shard``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.laws.training import (
    BF16,
    CASES,
    NUMBERS,
    Numbers,
    assert_alike,
    assert_same,
    by_fully_shard,
    digest,
    part_of_rank,
    reference,
    sharded,
)
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, simulated
from tests.support.refusals import text_of

F64, F32, MIXED = NUMBERS
Training = tuple[str, str]  # case and numbers
# float64 detects every wrong factor and order of axes; the other numbers add only their dtypes.
SIMULATED = {
    F64: simulated(2, 5, HYBRID, {"shard": 2, "replicate": 3}, {"replicate": 2}),
    F32: simulated(3),
    MIXED: [*simulated(2, HYBRID), *sequential(2)],
}
TWO, THREE, FOUR = gloo(2, 3, HYBRID)
# What runs on gloo ranks in one call: by default each case in float64, and each numbers; with -m slow each in all.
BY_DEFAULT: dict[Ranks, list[Training]] = {
    TWO: [*product(CASES, [F64]), ("3x3", F32), ("blocks", MIXED)],
    FOUR: [("blocks", MIXED), ("tied across units", F64)],
}
SLOW: dict[Ranks, list[Training]] = {
    TWO: [training for training in product(CASES, NUMBERS) if training not in BY_DEFAULT[TWO]],
    THREE: [("3x3", F64), ("3x3", MIXED), ("17x257", F32)],
    FOUR: [("frozen", F32), ("3x3", F32)],
}


@dataclass(frozen=True)
class Outcome:
    """What a training differs in from a plain loop, and on gloo ranks from FSDP2; and a digest of all of its bits."""

    unsharded: str
    fully_shard: str
    bits: bytes


def outcome(mesh: fs.Mesh, training: Training) -> Outcome:
    """All sides in one process, with the same kernels."""
    case, kind = CASES[training[0]], NUMBERS[training[1]]
    axes, side = dict(mesh.axes), "side by side" if mesh.kind == "batched" else "one by one"
    ours = sharded(case, mesh, kind.dtype, kind.precision)
    expected = reference(case, axes, kind.dtype, kind.precision, side)
    unsharded, theirs = text_of(assert_alike, ours, expected, kind.rtol, kind.atol), ""
    if not mesh.is_simulated:
        parts = part_of_rank(ours, mesh)
        exact = (kind.rtol, kind.atol) if mesh.size == 3 else (0, 0)  # the sum of a pair has no order
        theirs = text_of(assert_same, parts, by_fully_shard(case, axes, kind.dtype, kind.precision), *exact)
    return Outcome(unsharded, theirs, digest(ours))


def train(mesh: fs.Mesh, trainings: list[Training]) -> dict[Training, Outcome]:
    return {training: outcome(mesh, training) for training in trainings}


@cache
def results(ranks: Ranks, slow: bool) -> list[dict[Training, Outcome]]:
    """All trainings on gloo ranks in one call."""
    return ranks.run(train, (SLOW if slow else BY_DEFAULT)[ranks])


def outcomes(ranks: Ranks, *training: str) -> list[Outcome]:
    slow = training not in BY_DEFAULT.get(ranks, [])
    return [result[training] for result in results(ranks, slow)]  # pyright: ignore[reportArgumentType]


def trainings(which: dict[Ranks, list[Training]], *marks: Any) -> list[Any]:
    return [pytest.param(ranks, *one, marks=marks) for ranks, several in which.items() for one in several]


every_training = pytest.mark.parametrize(
    ("ranks", "case", "numbers"), [*trainings(BY_DEFAULT), *trainings(SLOW, pytest.mark.slow)], ids=str
)


@pytest.mark.parametrize(("numbers", "ranks"), [(n, ranks) for n in NUMBERS for ranks in SIMULATED[n]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_that_of_the_unsharded_loop(case: str, ranks: Ranks, numbers: str) -> None:
    assert ranks.run(train, [(case, numbers)])[0][case, numbers].unsharded == ""


@every_training
def test_every_gradient_of_gloo_ranks_is_that_of_the_unsharded_loop(ranks: Ranks, case: str, numbers: str) -> None:
    assert [outcome.unsharded for outcome in outcomes(ranks, case, numbers)] == [""] * ranks.size


@every_training
def test_every_gradient_is_that_of_fully_shard(ranks: Ranks, case: str, numbers: str) -> None:
    """Bitwise, in every precision, where the sum of a pair has no order."""
    assert [outcome.fully_shard for outcome in outcomes(ranks, case, numbers)] == [""] * ranks.size


@every_training
def test_all_ranks_have_the_same_gradients_and_parameters_bitwise(ranks: Ranks, case: str, numbers: str) -> None:
    assert len({outcome.bits for outcome in outcomes(ranks, case, numbers)}) == 1


def assert_parity(case: str, axes: dict[str, int], kind: Numbers) -> None:
    expected = reference(CASES[case], axes, kind.dtype, kind.precision, "side by side")
    actual = sharded(CASES[case], fs.simulated_mesh(axes), kind.dtype, kind.precision)
    assert_alike(actual, expected, kind.rtol, kind.atol)


@pytest.mark.parametrize("numbers", ["float64", "bfloat16, float32 reduction"])
@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_nine_elements_train_equally_on_two_to_eight_ranks(num_ranks: int, numbers: str) -> None:
    layout = fs.plan(CASES["3x3"].build(torch.float32), fs.simulated_mesh(num_ranks), align_bytes=0)
    held = [len(layout.slices(rank)) for rank in range(num_ranks)]
    assert (0 in held) == (num_ranks in (4, 6, 7, 8))  # the last rank has nothing at all
    assert_parity("3x3", {"shard": num_ranks}, NUMBERS[numbers])


@pytest.mark.parametrize("numbers", NUMBERS)
def test_17x257_elements_train_equally_on_128_ranks(numbers: str) -> None:
    layout = fs.plan(CASES["17x257"].build(torch.float32), fs.simulated_mesh(128), align_bytes=0)
    starts = {piece.start % 257 for rank in range(128) for piece in layout.slices(rank) if piece.name == "weight"}
    assert len(starts) > 100  # shards begin anywhere in a row
    kind = NUMBERS[numbers]
    if kind.precision:  # torch sums a stack of 20 rows and more in another order than from the first to the last
        kind = replace(kind, rtol=None, atol=None)
    assert_parity("17x257", {"shard": 128}, kind)


def test_frozen_parameters_keep_every_bit() -> None:
    before = CASES["frozen"].build(torch.float32)
    for precision in (None, BF16):
        training = sharded(CASES["frozen"], fs.simulated_mesh(3), torch.float32, precision)
        kept = {name: p.detach() for name, p in before.named_parameters() if not p.requires_grad}
        assert len(kept) == 5
        assert not kept.keys() & training.gradients[0].keys()
        for parameters in training.parameters:
            assert_trees_close({name: parameters[name] for name in kept}, kept, rtol=0, atol=0)


def test_the_comparison_sees_a_factor_a_rank_left_out_and_a_narrow_sum() -> None:
    case, mesh = CASES["blocks"], fs.simulated_mesh(2)
    expected = reference(case, {"shard": 2}, torch.float64)
    for wrong in (
        sharded(case, mesh, torch.float64, reduction="sum"),
        sharded(
            replace(case, batch=lambda num_ranks, generator: _one_for_all(case.batch(num_ranks, generator))),
            mesh,
            torch.float64,
        ),
    ):
        with pytest.raises(AssertionError, match="gradients 0"):
            assert_alike(wrong, expected, 1e-10, 1e-12)
    narrow = sharded(case, mesh, torch.float32, fs.MixedPrecision(torch.bfloat16))
    with pytest.raises(AssertionError, match="gradients 0"):
        assert_alike(narrow, reference(case, {"shard": 2}, torch.float32, BF16, "side by side"), 0, 0)


def _one_for_all(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of rank 0 on both ranks."""
    x, y = (rows.chunk(2)[0].repeat(2, 1) for rows in batch)
    return x, y
