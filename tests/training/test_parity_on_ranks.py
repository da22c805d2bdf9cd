"""Ten steps on gloo ranks: every gradient is that of a plain loop over ranks, and that of live ``fully_shard``."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

import functorch_shard as fs
from tests.support.parity import CASES, NUMBERS, Training, assert_alike, by_fully_shard, reference, sharded
from tests.support.pool import run_ranks

Result = dict[tuple[str, str], dict[str, Training]]


def train_on_this_rank(axes: dict[str, int], trainings: list[tuple[str, str]]) -> Result:
    """All sides in one process, with the same kernels."""
    torch.set_num_threads(1)
    mesh = fs.init_mesh(axes)
    return {
        (case, numbers): {
            "reference": reference(CASES[case], axes, kind.dtype, kind.precision),
            "ours": sharded(CASES[case], mesh, kind.dtype, kind.precision),
            "FSDP2": by_fully_shard(CASES[case], axes, kind.dtype, kind.precision),
        }
        for case, numbers in trainings
        for kind in (NUMBERS[numbers],)
    }


F64, F32, MIXED = NUMBERS
# Each case in all numbers on two ranks; in other runs each case once, and each numbers.
RUNS: dict[str, tuple[dict[str, int], list[tuple[str, str]]]] = {
    "2 ranks": ({"shard": 2}, list(product(CASES, NUMBERS))),
    "3 ranks": ({"shard": 3}, [("3x3", F64), ("3x3", MIXED), ("17x257", F32)]),
    "HSDP, 4 ranks": (
        {"replicate": 2, "shard": 2},
        [("blocks", MIXED), ("frozen", F32), ("tied across units", F64), ("3x3", F32)],
    ),
}


@cache
def results(run: str) -> list[Result]:
    axes, trainings = RUNS[run]
    return run_ranks(train_on_this_rank, fs.simulated_mesh(axes).size, axes, trainings)


every_training = pytest.mark.parametrize(
    ("run", "case", "numbers"),
    [(run, case, numbers) for run, (_, trainings) in RUNS.items() for case, numbers in trainings],
)


@every_training
def test_every_gradient_is_that_of_the_unsharded_loop(run: str, case: str, numbers: str) -> None:
    kind = NUMBERS[numbers]
    for result in results(run):
        assert_alike(result[case, numbers]["ours"], result[case, numbers]["reference"], kind.rtol, kind.atol)


@every_training
def test_every_gradient_is_that_of_fully_shard(run: str, case: str, numbers: str) -> None:
    """Bitwise, in every precision, where the sum of a pair has no order."""
    kind = NUMBERS[numbers]
    exact = (0, 0) if run != "3 ranks" else (kind.rtol, kind.atol)
    for result in results(run):
        assert_alike(result[case, numbers]["ours"], result[case, numbers]["FSDP2"], *exact)


@every_training
def test_all_ranks_have_the_same_gradients_and_parameters_bitwise(run: str, case: str, numbers: str) -> None:
    first, *others = (result[case, numbers]["ours"] for result in results(run))
    for other in others:
        assert_alike(other, first, 0, 0)
