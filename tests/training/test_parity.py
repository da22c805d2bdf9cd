"""Ten steps of SGD with momentum: every gradient of every step is that of a plain loop over ranks on whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.parity import BF16, CASES, NUMBERS, Numbers, assert_alike, reference, sharded

# float64 detects every wrong factor and order of axes; the other numbers add only their dtypes.
AXES: dict[str, list[dict[str, int]]] = {
    "float64": [
        {"shard": 2},
        {"shard": 5},
        {"replicate": 2, "shard": 2},
        {"shard": 2, "replicate": 3},
        {"replicate": 2},
    ],
    "float32": [{"shard": 3}],
    "bfloat16, float32 reduction": [{"shard": 2}, {"replicate": 2, "shard": 2}],
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """A second one costs more than it gives where tensors have a few elements."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_parity(case: str, axes: dict[str, int], kind: Numbers) -> None:
    expected = reference(CASES[case], axes, kind.dtype, kind.precision, "side by side")
    actual = sharded(CASES[case], fs.simulated_mesh(axes), kind.dtype, kind.precision)
    assert_alike(actual, expected, kind.rtol, kind.atol)


@pytest.mark.parametrize(("numbers", "axes"), [(n, axes) for n in NUMBERS for axes in AXES[n]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_that_of_the_unsharded_loop(case: str, axes: dict[str, int], numbers: str) -> None:
    assert_parity(case, axes, NUMBERS[numbers])


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


@pytest.mark.parametrize("options", [{"units": 100}, {"units": 1 << 20, "align_bytes": 256}], ids=str)
@pytest.mark.parametrize("case", ["frozen", "tied across units", "one block three times"])
def test_units_do_not_change_gradients(case: str, options: dict[str, Any]) -> None:
    expected = reference(CASES[case], {"shard": 3}, torch.float64)
    actual = sharded(CASES[case], fs.simulated_mesh(3), torch.float64, **options)
    assert_alike(actual, expected, 1e-10, 1e-12)


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
