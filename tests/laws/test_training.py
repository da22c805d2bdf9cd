"""Ten steps of SGD with momentum: every gradient is that of a plain loop over ranks, and of live ``fully_shard``."""

from __future__ import annotations

from dataclasses import dataclass
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
def test_every_gradient_of_gloo_ranks_is_that_of_the_unsharded_loop_and_of_fully_shard(
    ranks: Ranks, case: str, numbers: str
) -> None:
    """That of FSDP2 bitwise, in every precision, where the sum of a pair has no order; and all ranks have the same."""
    slow = (case, numbers) not in BY_DEFAULT.get(ranks, [])
    outcomes = [result[case, numbers] for result in results(ranks, slow)]
    assert [(outcome.unsharded, outcome.fully_shard) for outcome in outcomes] == [("", "")] * ranks.size
    assert len({outcome.bits for outcome in outcomes}) == 1


@pytest.mark.parametrize("numbers", ["float64", "bfloat16, float32 reduction"])
@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_nine_elements_train_equally_on_two_to_eight_ranks(num_ranks: int, numbers: str) -> None:
    layout = fs.plan(CASES["3x3"].build(torch.float32), fs.simulated_mesh(num_ranks), align_bytes=0)
    held = [len(layout.slices(rank)) for rank in range(num_ranks)]
    assert (0 in held) == (num_ranks in (4, 6, 7, 8))  # the last rank has nothing at all
    outcome = train(fs.simulated_mesh(num_ranks), [("3x3", numbers)])["3x3", numbers]
    assert outcome.unsharded == ""


def test_frozen_parameters_keep_every_bit() -> None:
    before = CASES["frozen"].build(torch.float32)
    for precision in (None, BF16):
        training = sharded(CASES["frozen"], fs.simulated_mesh(3), torch.float32, precision)
        kept = {name: p.detach() for name, p in before.named_parameters() if not p.requires_grad}
        assert len(kept) == 5
        assert not kept.keys() & training.gradients[0].keys()
        for parameters in training.parameters:
            assert_trees_close({name: parameters[name] for name in kept}, kept, rtol=0, atol=0)
