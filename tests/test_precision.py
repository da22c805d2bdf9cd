"""Mixed precision on simulated ranks: what travels, what is computed in, and what gradients are summed in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.refusals import refused

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
THIRDS = torch.arange(1, 8) / 3  # no bfloat16 holds one of the 3rds

# param_dtype and reduce_dtype; what is computed in, and what 256 + 1 is as the sum over ranks.
RULES: dict[str, tuple[fs.MixedPrecision | None, torch.dtype, float]] = {
    "nothing": (None, F32, 257.0),
    "both None": (fs.MixedPrecision(), F32, 257.0),
    "params": (fs.MixedPrecision(BF16), BF16, 256.0),  # reduce_dtype None is param_dtype
    "params, exact sums": (fs.MixedPrecision(BF16, F32), BF16, 257.0),
    "sums alone": (fs.MixedPrecision(None, BF16), F32, 256.0),
    "halves": (fs.MixedPrecision(F16, BF16), F16, 256.0),
    "wider": (fs.MixedPrecision(F64), F64, 257.0),
}
every_rule = pytest.mark.parametrize("rule", RULES)


def planned(mesh: fs.Mesh, precision: fs.MixedPrecision | None, **options: Any) -> tuple[fs.Sharded, fs.Layout]:
    values = {"m.w": THIRDS, "m.n": torch.tensor([3, 2**20 + 1]), "m.mask": torch.tensor([True, False, True])}
    layout = fs.plan(values, mesh, precision=precision, **{"reduction": "sum", **options})
    return fs.shard(values, layout), layout


@every_rule
def test_gather_casts_to_param_dtype_and_returns_stored_values_on_request(rule: str) -> None:
    precision, computed, _ = RULES[rule]
    mesh = fs.simulated_mesh(2)
    params, _ = planned(mesh, precision)
    for gather in (fs.gather, lambda p: {n: x[0] for n, x in mesh.spmd(lambda p: dict(fs.gather(p)))(p).items()}):
        full = gather(params)
        assert torch.equal(full["m.w"], THIRDS.to(computed))
        assert torch.equal(full["m.n"], torch.tensor([3, 2**20 + 1]))
        assert torch.equal(full["m.mask"], torch.tensor([True, False, True]))
    for dtype in (F32, F64, F16):
        exact = fs.gather(params, dtype=dtype)
        assert torch.equal(exact["m.w"], THIRDS.to(dtype))
        assert exact["m.w"].dtype == dtype
        assert exact["m.n"].dtype == torch.int64


@every_rule
def test_gradients_are_stored_as_parameters_are_and_summed_in_reduce_dtype(rule: str) -> None:
    precision, _, total = RULES[rule]
    mesh = fs.simulated_mesh(2)
    params, _ = planned(mesh, precision)
    rows = torch.tensor([256.0, 1.0])
    for differentiate in (grad, fs.grad):
        part, frozen = fs.partition(params)
        loss = lambda p, f, x: (fs.gather(p, f)["m.w"] * x.to(fs.gather(p, f)["m.w"].dtype)).sum()  # noqa: E731
        grads = mesh.spmd(differentiate(loss))(part, frozen, rows)
        assert torch.equal(grads["m/float32"].flatten()[:7], torch.full((7,), total))


def test_one_wide_sum_keeps_what_a_narrow_one_loses_over_copies_too() -> None:
    mesh = fs.simulated_mesh({"replicate": 2, "shard": 2})
    rows = torch.tensor([[256.0, 0.0], [1.0, 1.0]])
    for reduce_dtype, total in ((BF16, 258.0), (F32, 258.0)):
        assert summed(mesh, rows, reduce_dtype) == total
    rows = torch.tensor([[256.0, 1.0], [256.0, 1.0]])
    for reduce_dtype, total in ((BF16, 512.0), (F32, 514.0)):  # 256 + 1 over the shards, twice
        assert summed(mesh, rows, reduce_dtype) == total
    rows = torch.tensor([[256.0, 0.0], [1.0, 0.0]])
    for reduce_dtype, total in ((BF16, 256.0), (F32, 257.0)):  # 256 over the shards, and 1
        assert summed(mesh, rows, reduce_dtype) == total


def summed(mesh: fs.Mesh, rows: Tensor, reduce_dtype: torch.dtype) -> float:
    params, frozen = fs.partition(planned(mesh, fs.MixedPrecision(BF16, reduce_dtype))[0])
    loss = lambda p, f, x: (fs.gather(p, f)["m.w"] * x.to(BF16)).sum()  # noqa: E731
    return mesh.spmd(grad(loss))(params, frozen, rows)["m/float32"].flatten()[0].item()


def test_the_mean_is_taken_of_the_stored_dtype() -> None:
    mesh = fs.simulated_mesh(3)
    params, frozen = fs.partition(planned(mesh, fs.MixedPrecision(BF16), reduction="mean")[0])
    loss = lambda p, f, x: (fs.gather(p, f)["m.w"] * x.to(BF16)).sum()  # noqa: E731
    grads = mesh.spmd(grad(loss))(params, frozen, torch.tensor([1.0, 1.0, 2.0]))
    assert torch.equal(grads["m/float32"].flatten()[:7], torch.full((7,), 4.0) / 3)


def test_gradients_by_hand_are_summed_in_reduce_dtype() -> None:
    mesh = fs.simulated_mesh(2)
    rows = torch.tensor([[256.0], [1.0]])
    for given, reduce_dtype, total in (
        (F32, BF16, 256.0),
        (BF16, F32, 257.0),
        (BF16, None, 256.0),
        (F32, None, 257.0),  # what is given in float32 is summed in it
    ):
        values = {"w": torch.zeros(1)}
        layout = fs.plan(values, mesh, precision=fs.MixedPrecision(None, reduce_dtype), reduction="sum")
        grads = fs.scatter_grads({"w": rows.to(given)}, layout)
        assert grads["(root)"].dtype == F32
        assert grads["(root)"].flatten()[0] == total


def test_complex_parameters_and_gradients_are_never_cast() -> None:
    mesh = fs.simulated_mesh(2)
    values = {"z": torch.tensor([1 / 3 + 2j, 3 - 1j / 3], dtype=torch.complex64)}
    for precision in (fs.MixedPrecision(BF16), fs.MixedPrecision(BF16, F32), fs.MixedPrecision(None, BF16)):
        layout = fs.plan(values, mesh, precision=precision, reduction="sum")
        params = fs.shard(values, layout)
        assert_trees_close(dict(fs.gather(params)), values, rtol=0, atol=0)
        grads = mesh.spmd(grad(lambda p: fs.gather(p)["z"].abs().square().sum()))(params)
        expected = fs.shard({"z": 4 * values["z"]}, layout)
        assert_trees_close(dict(grads), dict(expected))
        by_hand = fs.scatter_grads({"z": torch.stack([2 * values["z"]] * 2)}, layout)
        assert_trees_close(dict(by_hand), dict(expected))


def test_bytes_on_the_wire_are_those_of_the_dtypes_that_travel() -> None:
    mesh = fs.simulated_mesh(2)
    for precision, gathered, reduced in (
        (None, 4, 4),
        (fs.MixedPrecision(BF16), 2, 2),
        (fs.MixedPrecision(BF16, F32), 2, 4),
        (fs.MixedPrecision(None, BF16), 4, 2),
        (fs.MixedPrecision(F64, F16), 8, 2),
    ):
        values = {"w": THIRDS}
        layout = fs.plan(values, mesh, precision=precision)
        with count_collectives() as seen:
            mesh.spmd(grad(lambda p: fs.gather(p)["w"].float().sum()))(fs.shard(values, layout))
        assert [(c.kind, c.numel, c.nbytes) for c in seen.issued] == [
            ("all_gather", 4, 4 * gathered),
            ("psum_scatter", 8, 8 * reduced),
        ]


@every_rule
def test_tangents_travel_as_parameters_do(rule: str) -> None:
    precision, computed, _ = RULES[rule]
    mesh = fs.simulated_mesh(2)
    part, frozen = fs.partition(planned(mesh, precision)[0])
    tangent = jvp(lambda p: mesh.spmd(lambda p, f: fs.gather(p, f)["m.w"])(p, frozen)[0], (part,), (part,))[1]
    assert torch.equal(tangent, THIRDS.to(computed))


@every_rule
def test_per_sample_gradients_are_those_of_each_sample(rule: str) -> None:
    precision, computed, _ = RULES[rule]
    mesh = fs.simulated_mesh(2)
    part, frozen = fs.partition(planned(mesh, precision)[0])
    rows = torch.tensor([[256.0, 3.0, -7.5], [1.0, 1 / 3, 100.0]]).to(computed)
    loss = lambda p, f, x: (fs.gather(p, f)["m.w"] * x).sum()  # noqa: E731
    mapped = mesh.spmd(vmap(grad(loss), (None, None, 0)))(part, frozen, rows)["m/float32"]
    for i in range(3):
        alone = mesh.spmd(grad(loss))(part, frozen, rows[:, i])["m/float32"]
        assert torch.equal(mapped[:, i], alone)


WRONG: dict[str, Any] = {"text": "bfloat16", "integer": torch.int8, "bool": torch.bool, "complex": torch.complex64}


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_floating_point_dtype_is_refused(case: str, name: str) -> None:
    text = refused(fs.MixedPrecision, **{name: WRONG[case]})
    assert text == f"TypeError: MixedPrecision: {name}: got {WRONG[case]!r}, expected a floating-point dtype or None"


def test_gather_refuses_to_cast_to_what_is_no_floating_point_dtype() -> None:
    params, _ = planned(fs.simulated_mesh(2), None)
    assert refused(fs.gather, params, dtype=torch.int8) == (
        "TypeError: gather: dtype: got torch.int8, expected a floating-point dtype to compute in, or None"
    )


def test_parts_of_different_precision_do_not_gather_together() -> None:
    mesh = fs.simulated_mesh(2)
    part, _ = fs.partition(planned(mesh, None)[0])
    _, frozen = fs.partition(planned(mesh, fs.MixedPrecision(BF16))[0])
    assert "precision: MixedPrecision(param_dtype=None, reduce_dtype=None) in the first tree, " in refused(
        fs.gather, part, frozen
    )
