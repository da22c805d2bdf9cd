"""Five steps of SGD with momentum: every gradient is that of a plain loop over ranks, and of live ``fully_shard``."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import functorch_shard as fs
from tests.laws.training import (
    CASES,
    NUMBERS,
    assert_alive,
    assert_same,
    by_fully_shard,
    digest,
    part_of_rank,
    reference,
    sharded,
)
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, simulated

F64, F32, MIXED = NUMBERS
# float64 detects every wrong factor and order of axes; the other numbers add only their dtypes.
SIMULATED = {
    F64: simulated(2, 5, HYBRID, {"shard": 2, "replicate": 3}, {"replicate": 2}),
    F32: [*simulated(3), *sequential(2)],
}
TWO, THREE, FOUR = gloo(2, 3, HYBRID)
REAL: list[tuple[Ranks, str, str]] = [*product([TWO], CASES, [F64]), (TWO, "3x3", F32), (TWO, "frozen", MIXED)]
REAL += [(FOUR, "blocks", MIXED), (FOUR, "tied across units", F64)]
SLOW = [one for one in product([TWO], CASES, [F32, MIXED]) if one not in REAL]
SLOW += [(THREE, "3x3", F64), (THREE, "3x3", MIXED), (THREE, "17x257", F32), (FOUR, "frozen", F32), (FOUR, "3x3", F32)]


def train(mesh: fs.Mesh, name: str, numbers: str) -> bytes:
    """A digest of all bits. Numbers are those of a plain loop, and on gloo ranks of FSDP2, all in one process."""
    case, kind = CASES[name], NUMBERS[numbers]
    ours = sharded(case, mesh, kind.dtype, kind.precision)
    assert_alive(ours)
    if kind.precision is None:
        assert_same(ours, reference(case, mesh.size, kind.dtype), kind.rtol, kind.atol)
    if not mesh.is_simulated:
        exact = (kind.rtol, kind.atol) if mesh.size == 3 else (0, 0)  # the sum of a pair has no order
        assert_same(part_of_rank(ours, mesh), by_fully_shard(case, mesh.axes, kind.dtype, kind.precision), *exact)
    return digest(ours)


@pytest.mark.parametrize(("numbers", "ranks"), [(n, ranks) for n in SIMULATED for ranks in SIMULATED[n]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_that_of_the_unsharded_loop(case: str, ranks: Ranks, numbers: str) -> None:
    ranks.run(train, case, numbers)


@pytest.mark.parametrize(
    ("ranks", "case", "numbers"), [*REAL, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)], ids=str
)
def test_every_gradient_of_gloo_ranks_is_that_of_the_unsharded_loop_and_of_fully_shard(
    ranks: Ranks, case: str, numbers: str
) -> None:
    """That of FSDP2 bitwise, in every precision, where the sum of a pair has no order; and all ranks have the same.

    Simulated ranks have the bits of gloo ranks in every precision: test_interpreters.py.
    """
    assert len({*ranks.run(train, case, numbers)}) == 1


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_nine_elements_train_equally_on_two_to_eight_ranks(num_ranks: int) -> None:
    layout = fs.plan(CASES["3x3"].build(torch.float32), fs.simulated_mesh(num_ranks), align_bytes=0)
    held = [len(layout.slices(rank)) for rank in range(num_ranks)]
    assert (0 in held) == (num_ranks in (4, 6, 7, 8))  # the last rank has nothing at all
    train(fs.simulated_mesh(num_ranks), "3x3", F64)
