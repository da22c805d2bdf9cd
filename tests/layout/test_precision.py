"""Mixed precision on simulated ranks: the dtypes of gathers, of computation, and of sums of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import functorch_shard as fs
from functorch_shard.layout.precision import divide_factors
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.refusals import refused

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


EIGHT = [{"shard": 8}, {"replicate": 8}, {"replicate": 2, "shard": 4}]


def by_everybody(layout: fs.Layout, rows: Tensor) -> dict[str, Tensor]:
    """The gradient of ``w . rows``, different on every rank: by hand, and as anybody differentiates."""
    mesh = layout.mesh
    values = {"w": torch.zeros(rows.shape[-1], dtype=rows.dtype)}
    params = fs.shard(values, layout)
    loss = lambda p, x: (fs.gather(p)["w"].float() * x.float()).sum()  # noqa: E731
    return {
        "scatter_grads": fs.scatter_grads({"w": rows}, layout)["(root)"],
        "torch.func.grad": mesh.spmd(grad(loss))(params, rows)["(root)"],
        "fs.grad": mesh.spmd(fs.grad(loss))(params, rows)["(root)"],
        "fs.grad of fs.grad": mesh.spmd(fs.grad(lambda p, x: loss(p, x) + 0 * fs.grad(loss)(p, x)["(root)"].sum()))(
            params, rows
        )["(root)"],
    }


@pytest.mark.parametrize("axes", EIGHT, ids=str)
@pytest.mark.parametrize("reduce_dtype", [None, F32])
def test_a_mean_of_float16_that_fits_does_not_overflow(reduce_dtype: torch.dtype | None, axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh({"shard": 1, **axes})
    layout = fs.plan(
        {"w": torch.zeros(8, dtype=F16)}, mesh, precision=fs.MixedPrecision(reduce_dtype=reduce_dtype), align_bytes=0
    )
    rows = torch.full((*mesh.axes.values(), 8), 16384.0, dtype=F16)  # whose multiples float16 has, up to the largest
    for who, result in by_everybody(layout, rows).items():
        assert result.dtype == F16, who
        assert (result == 16384.0).all(), who


@pytest.mark.parametrize("axes", [{"shard": 3}, {"replicate": 3}, {"replicate": 3, "shard": 5}], ids=str)
def test_a_mean_of_bfloat16_is_rounded_once(axes: dict[str, int]) -> None:
    """Of sums in float32. A sum rounded before it is divided differs in about one element of seven."""
    mesh = fs.simulated_mesh({"shard": 1, **axes})
    size = 64 * mesh["shard"].size
    layout = fs.plan(
        {"w": torch.zeros(size, dtype=BF16)}, mesh, precision=fs.MixedPrecision(reduce_dtype=F32), align_bytes=0
    )
    rows = torch.randn(*mesh.axes.values(), size, generator=torch.Generator().manual_seed(0)).to(BF16)
    over_shards = rows.float().sum(list(mesh.axes).index("shard"))  # in the order of the library: shards, then copies
    total = over_shards.flatten(0, -2).sum(0) if over_shards.ndim > 1 else over_shards
    expected = (total / mesh.size).to(BF16)
    assert ((total.to(BF16) / mesh.size) != expected).any()
    for who, result in by_everybody(layout, rows).items():
        whole = result.select(list(mesh.axes).index("replicate"), 0) if "replicate" in mesh.axes else result
        assert torch.equal(whole.flatten(), expected), who


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


def test_bytes_sent_are_those_of_the_gathered_and_reduced_dtypes() -> None:
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
def test_tangents_are_gathered_in_the_dtype_of_parameters(rule: str) -> None:
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


def test_float16_sums_are_divided_before_and_after_as_fully_shard_does_it() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    class Ranks:
        def __init__(self, size: int) -> None:
            self.size = lambda: size

    for n in range(1, 300):
        before, after, *_ = _get_gradient_divide_factors(Ranks(n), None, F16)  # pyright: ignore[reportArgumentType]
        assert divide_factors(n, F16) == (before, after)
        assert all(divide_factors(n, dtype) == (1, n) for dtype in (BF16, F32, F64))
    assert [divide_factors(n, F16) for n in (3, 6, 128)] == [(2, 1.5), (4, 1.5), (16, 8)]


@pytest.mark.parametrize("axes", [{"shard": 4}, {"replicate": 4}, {"replicate": 2, "shard": 2}], ids=str)
def test_a_mean_of_float16_does_not_overflow_where_its_sum_would(axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh(axes)
    values = {"w": torch.zeros(3)}
    rows = torch.full((4,), 30_000.0).view(*axes.values())
    loss = lambda p, x: (fs.gather(p)["w"] * x.to(F16)).float().sum()  # noqa: E731
    for reduction, total in (("mean", 30_000.0), ("sum", torch.inf)):
        layout = fs.plan(values, mesh, precision=fs.MixedPrecision(F16), reduction=reduction)  # pyright: ignore[reportArgumentType]
        params = fs.shard(values, layout)
        for grads in (
            mesh.spmd(grad(loss))(params, rows),
            fs.scatter_grads({"w": rows.to(F16).unsqueeze(-1).expand(*rows.shape, 3)}, layout),
        ):
            assert torch.equal(fs.gather(grads, dtype=F32)["w"], torch.full((3,), total))


def test_inputs_outputs_and_buffers_are_cast_where_a_policy_says_so() -> None:
    policy = fs.MixedPrecision(BF16, output_dtype=F32, buffer_dtype=F64)
    tree: dict[str, Any] = {
        "x": torch.ones(2),
        "n": torch.ones(2, dtype=torch.int32),
        "z": torch.ones(1, dtype=torch.complex64),
    }
    tree |= {"mask": torch.ones(1, dtype=torch.bool), "text": "left", "none": None}
    for cast, dtype in ((policy.cast_inputs, BF16), (policy.cast_output, F32), (policy.cast_buffers, F64)):
        done = cast((tree, [tree["x"].half()]))
        assert_trees_close(done, ({**tree, "x": tree["x"].to(dtype)}, [torch.ones(2, dtype=dtype)]))
    for silent in (fs.MixedPrecision(BF16, cast_forward_inputs=False), fs.MixedPrecision()):
        assert silent.cast_inputs(tree) is tree
        assert silent.cast_output(tree) is tree
        assert silent.cast_buffers(tree) is tree


def low(mesh: fs.Mesh, keep: bool) -> fs.Sharded:
    policies = {"a": fs.MixedPrecision(BF16, keep_low_precision_grads=keep), "b": fs.MixedPrecision(None, F64)}
    values = {"a.w": THIRDS, "a.n": torch.tensor([3, 5]), "b.w": THIRDS.clone()}
    return fs.shard(values, fs.plan(values, mesh, precision=policies, reduction="sum"))


def test_gradients_stay_in_low_precision_if_a_policy_keeps_them() -> None:
    mesh = fs.simulated_mesh(2)
    rows = torch.tensor([256.0, 1.0])

    def loss_of(full: fs.Full, x: Tensor) -> Tensor:
        return (full["a.w"] * x.to(BF16)).sum().float() + (full["b.w"] * x).sum()

    loss = lambda p, x: loss_of(fs.gather(p), x)  # noqa: E731
    by_hand = lambda p, x: fs.scatter_grads(fs.grad(loss_of)(fs.gather(p), x))  # noqa: E731
    for keep, dtype in ((False, F32), (True, BF16)):
        params = low(mesh, keep)
        for differentiate in (fs.grad(loss), by_hand, lambda p, x: fs.grad_and_value(loss)(p, x)[0]):
            grads = mesh.spmd(differentiate)(params, rows)
            assert (grads["a/float32"].dtype, grads["b"].dtype, grads["a/int64/frozen"]) == (dtype, F32, None)
            assert torch.equal(grads["a/float32"].float().flatten()[:7], torch.full((7,), 256.0))  # summed in bfloat16
            assert torch.equal(grads["b"].flatten()[:7], torch.full((7,), 257.0))


def test_a_step_accepts_gradients_of_either_precision() -> None:
    mesh = fs.simulated_mesh(2)
    opt = fs.optimizer(torch.optim.AdamW, lr=0.1)
    results = []
    for keep in (False, True):
        params = low(mesh, keep)
        grads = fs.Sharded({k: None if x.dtype == torch.int64 else x * 2 for k, x in params.items()}, params.layout)
        grads = fs.Sharded({k: x if x is None else x.bfloat16() for k, x in grads.items()}, params.layout)
        if not keep:
            grads = fs.Sharded({k: x if x is None else x.float() for k, x in grads.items()}, params.layout)
        new, state = opt.step(params, grads=grads, state=opt.init(params))
        results.append((dict(new), {name: dict(tree) for name, tree in state.items()}))
    assert_trees_close(results[1], results[0], rtol=0, atol=0)


def test_microbatches_are_added_up_in_the_dtype_they_are_reduced_in() -> None:
    mesh = fs.simulated_mesh(2)
    values = {
        "a.w": THIRDS,
        "b.w": THIRDS.clone(),
        "b.n": torch.tensor(3),
        "c.z": torch.zeros(2, dtype=torch.complex64),
    }
    policies = {"a": fs.MixedPrecision(BF16, F32), "b": fs.MixedPrecision(BF16), "c": fs.MixedPrecision(BF16, F32)}
    layout = fs.plan(values, mesh, precision=policies, reduction="sum")

    def microbatch(x: float) -> fs.Full:
        return fs.Full({"a.w": torch.full((7,), x, dtype=BF16), "b.w": torch.full((7,), x, dtype=BF16), "b.n": None,
                        "c.z": torch.full((2,), x * 1j)}, layout)  # fmt: skip

    first = microbatch(256.0)
    total = fs.accumulate(fs.accumulate(None, first), microbatch(1.0))
    assert_trees_close(first, microbatch(256.0), rtol=0, atol=0)
    assert fs.accumulate(None, first)["b.w"] is not first["b.w"]
    assert_trees_close(total, {"a.w": torch.full((7,), 257.0), "b.w": torch.full((7,), 256.0, dtype=BF16),
                               "b.n": None, "c.z": torch.full((2,), 257j)}, rtol=0, atol=0)  # fmt: skip
    assert total.layout is layout
    some = fs.accumulate(fs.accumulate(None, fs.Full(dict.fromkeys(values), layout)), first)
    assert_trees_close(some, fs.accumulate(None, first), rtol=0, atol=0)
    assert_trees_close(fs.accumulate(some, fs.Full(dict.fromkeys(values), layout)), some, rtol=0, atol=0)
    for wrong in ((None, dict(first)), (dict(first), first), (None, fs.shard(values, layout))):
        assert refused(fs.accumulate, *wrong).startswith("TypeError: accumulate: ")


WRONG: dict[str, Any] = {"text": "bfloat16", "integer": torch.int8, "bool": torch.bool, "complex": torch.complex64}


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"])
@pytest.mark.parametrize("case", WRONG)
def test_a_dtype_that_is_not_floating_point_is_refused(case: str, name: str) -> None:
    text = refused(fs.MixedPrecision, **{name: WRONG[case]})
    assert text == f"TypeError: MixedPrecision: {name}: got {WRONG[case]!r}, expected a floating-point dtype or None"


@pytest.mark.parametrize("name", ["cast_forward_inputs", "keep_low_precision_grads"])
def test_what_is_neither_true_nor_false_is_refused(name: str) -> None:
    text = refused(fs.MixedPrecision, **{name: torch.bfloat16})
    assert text == f"TypeError: MixedPrecision: {name}: got torch.bfloat16, expected True or False"


def test_gather_refuses_to_cast_to_a_dtype_that_is_not_floating_point() -> None:
    params, _ = planned(fs.simulated_mesh(2), None)
    assert refused(fs.gather, params, dtype=torch.int8) == (
        "TypeError: gather: dtype: got torch.int8, expected a floating-point dtype to compute in, or None"
    )


def test_parts_of_different_precision_do_not_gather_together() -> None:
    mesh = fs.simulated_mesh(2)
    part, _ = fs.partition(planned(mesh, None)[0])
    _, frozen = fs.partition(planned(mesh, fs.MixedPrecision(BF16))[0])
    expected = "unit 'm': MixedPrecision() in the first tree, MixedPrecision(param_dtype=torch.bfloat16) in another"
    assert expected in refused(fs.gather, part, frozen)
