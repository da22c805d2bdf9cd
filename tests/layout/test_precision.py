"""Mixed precision on simulated and gloo ranks: the dtypes of gathers, of computation, and of sums of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad

import functorch_shard as fs
from functorch_shard.layout.precision import divide_factors
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.ranks import Ranks, gloo, rows_of, simulated
from tests.support.refusals import refused

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
THIRDS = torch.arange(1, 8) / 3  # no bfloat16 holds one of the 3rds

# param_dtype and reduce_dtype; what is computed in, and what 256 + 1 is as the sum over ranks.
RULES: dict[str, tuple[fs.MixedPrecision | None, torch.dtype, float]] = {
    "both None": (fs.MixedPrecision(), F32, 257.0),
    "params": (fs.MixedPrecision(BF16), BF16, 256.0),  # reduce_dtype None is param_dtype
    "params, exact sums": (fs.MixedPrecision(BF16, F32), BF16, 257.0),
    "sums alone": (fs.MixedPrecision(None, BF16), F32, 256.0),
    "wider": (fs.MixedPrecision(F64), F64, 257.0),
}
every_rule = pytest.mark.parametrize("rule", RULES)
VALUES = {"m.w": THIRDS, "m.n": torch.tensor([3, 2**20 + 1]), "m.mask": torch.tensor([True, False, True])}
KINDS = [*simulated(2), *gloo(2)]


def planned(mesh: fs.Mesh, precision: fs.MixedPrecision | None, **options: Any) -> tuple[fs.Sharded, fs.Layout]:
    layout = fs.plan(VALUES, mesh, precision=precision, **{"reduction": "sum", **options})
    return fs.shard(VALUES, layout), layout


def gathered(mesh: fs.Mesh, rule: str) -> list[Any]:
    """Inside and outside spmd, and what is stored in dtypes that were asked for."""
    params, _ = planned(mesh, RULES[rule][0])
    inside = mesh.spmd(lambda p: dict(fs.materialize(fs.gather(p))))(params)
    exact = [fs.gather(params, lazy=False, dtype=dtype) for dtype in (F32, F64, F16)]
    return [inside, fs.gather(params, lazy=False), *exact]


@pytest.mark.parametrize("ranks", KINDS, ids=str)
@every_rule
def test_gather_casts_to_param_dtype_and_returns_stored_values_on_request(rule: str, ranks: Ranks) -> None:
    dtypes = [RULES[rule][1]] * 2 + [F32, F64, F16]
    for results in ranks.run(gathered, rule):
        for full, dtype in zip(results, dtypes, strict=True):
            assert_trees_close(dict(full), {**VALUES, "m.w": THIRDS.to(dtype)}, rtol=0, atol=0)


def loss(p: fs.Sharded, f: fs.Sharded, x: Tensor) -> Tensor:
    w = fs.gather(p, f)["m.w"]
    return (w * x.to(w.dtype)).sum()


def narrow_or_wide(mesh: fs.Mesh, rule: str) -> tuple[list[Tensor], list[int]]:
    """Gradients where ranks have 256 and 1, and the bytes that are sent for one."""
    part, frozen = fs.partition(planned(mesh, RULES[rule][0])[0])
    x = rows_of(mesh, torch.tensor([256.0, 1.0]))
    with count_collectives() as seen:
        by_fs = mesh.spmd(fs.grad(loss))(part, frozen, x)
    by_torch = mesh.spmd(grad(loss))(part, frozen, x)
    floats = [c for c in seen.issued if c.dtype.is_floating_point]
    nbytes = [c.nbytes for c in floats if c.kind in ("all_gather", "psum_scatter")]
    return [by_fs["m/float32"], by_torch["m/float32"]], nbytes


@pytest.mark.parametrize("ranks", KINDS, ids=str)
@every_rule
def test_gradients_are_stored_as_parameters_are_and_summed_in_reduce_dtype(rule: str, ranks: Ranks) -> None:
    """A narrow reduction loses what a wide one keeps."""
    precision, computed, total = RULES[rule]
    summed_in = (precision and precision.reduce_dtype) or computed
    for rank, (grads, nbytes) in enumerate(ranks.run(narrow_or_wide, rule)):
        for x in grads:
            assert x.dtype == F32
            assert x.tolist() == ([total] * 4 if rank == 0 else [total] * 3 + [0.0])  # and padding
        assert nbytes == [4 * computed.itemsize, 8 * summed_in.itemsize]


def by_everybody(layout: fs.Layout, rows: Tensor) -> dict[str, Tensor]:
    """The gradient of ``w . rows``, different on every rank: by hand, and as anybody differentiates."""
    mesh = layout.mesh
    values = {"w": torch.zeros(rows.shape[-1], dtype=rows.dtype)}
    params = fs.shard(values, layout)

    def loss(p: fs.Sharded, x: Tensor) -> Tensor:
        return (fs.gather(p)["w"].float() * x.float()).sum()

    return {
        "scatter_grads": fs.scatter_grads({"w": rows}, layout)["(root)"],
        "torch.func.grad": mesh.spmd(grad(loss))(params, rows)["(root)"],
        "fs.grad": mesh.spmd(fs.grad(loss))(params, rows)["(root)"],
        "fs.grad of fs.grad": mesh.spmd(fs.grad(lambda p, x: loss(p, x) + 0 * fs.grad(loss)(p, x)["(root)"].sum()))(
            params, rows
        )["(root)"],
    }


@pytest.mark.parametrize("axes", [{"replicate": 3}, {"replicate": 3, "shard": 5}], ids=str)
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


COMPLEX = {"z": torch.tensor([1 / 3 + 2j, 3 - 1j / 3, 1j], dtype=torch.complex64)}


def test_complex_parameters_and_gradients_are_never_cast() -> None:
    """Whatever reals are gathered and summed in: gradients of both transforms and by hand."""
    mesh = fs.simulated_mesh(2)
    by_hand, expected = torch.stack([2 * COMPLEX["z"]] * 2), fs.shard({"z": 4 * COMPLEX["z"]}, fs.plan(COMPLEX, mesh))
    for precision in map(fs.MixedPrecision, (BF16, BF16, None), (None, F32, F16)):
        layout = fs.plan(COMPLEX, mesh, precision=precision, reduction="sum")
        params = fs.shard(COMPLEX, layout)
        assert_trees_close(dict(fs.gather(params)), COMPLEX, rtol=0, atol=0)
        for gradient in (fs.grad, grad):
            grads = mesh.spmd(gradient(lambda p: fs.gather(p)["z"].abs().square().sum()))(params)
            assert_trees_close(dict(grads), dict(expected))
        assert_trees_close(dict(fs.scatter_grads({"z": by_hand}, layout)), dict(expected))


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


def test_a_mean_of_float16_does_not_overflow_where_its_sum_would() -> None:
    mesh = fs.simulated_mesh({"replicate": 2, "shard": 2})
    values = {"w": torch.zeros(3)}
    rows = torch.full((2, 2), 30_000.0)

    def loss(p: fs.Sharded, x: Tensor) -> Tensor:
        return (fs.gather(p)["w"] * x.to(F16)).float().sum()

    for reduction, total in (("mean", 30_000.0), ("sum", torch.inf)):
        layout = fs.plan(values, mesh, precision=fs.MixedPrecision(F16), reduction=reduction)  # pyright: ignore[reportArgumentType]
        params = fs.shard(values, layout)
        for grads in (
            mesh.spmd(grad(loss))(params, rows),
            fs.scatter_grads({"w": rows.to(F16).unsqueeze(-1).expand(*rows.shape, 3)}, layout),
        ):
            assert torch.equal(fs.gather(grads, dtype=F32)["w"], torch.full((3,), total))


def test_dtypes_that_are_not_of_floating_point_are_refused() -> None:
    for name, wrong in {"param_dtype": "bfloat16", "reduce_dtype": torch.int8}.items():
        text = refused(fs.MixedPrecision, **{name: wrong})
        assert text == f"TypeError: MixedPrecision: {name}: got {wrong!r}, expected a floating-point dtype or None"


def low(mesh: fs.Mesh, keep: bool) -> fs.Sharded:
    policies = {"a": fs.MixedPrecision(BF16, keep_low_precision_grads=keep), "b": fs.MixedPrecision(None, F64)}
    values = {"a.w": THIRDS, "a.n": torch.tensor([3, 5]), "b.w": THIRDS.clone()}
    return fs.shard(values, fs.plan(values, mesh, precision=policies.get, reduction="sum"))


def test_gradients_stay_in_low_precision_if_a_policy_keeps_them() -> None:
    mesh = fs.simulated_mesh(2)
    rows = torch.tensor([256.0, 1.0])

    def loss_of(full: fs.Full, x: Tensor) -> Tensor:
        return (full["a.w"] * x.to(BF16)).sum().float() + (full["b.w"] * x).sum()

    def loss(p: fs.Sharded, x: Tensor) -> Tensor:
        return loss_of(fs.gather(p), x)

    def by_hand(p: fs.Sharded, x: Tensor) -> fs.Sharded:
        return fs.scatter_grads(fs.grad(loss_of)(fs.gather(p), x))

    for keep, dtype in ((False, F32), (True, BF16)):
        params = low(mesh, keep)
        for differentiate in (fs.grad(loss), by_hand, lambda p, x: fs.grad_and_value(loss)(p, x)[0]):
            grads = mesh.spmd(differentiate)(params, rows)
            assert (grads["a/float32"].dtype, grads["b"].dtype, grads["a/int64/frozen"]) == (dtype, F32, None)
            assert torch.equal(grads["a/float32"].float().flatten()[:7], torch.full((7,), 256.0))  # summed in bfloat16
            assert torch.equal(grads["b"].flatten()[:7], torch.full((7,), 257.0))


def test_microbatches_are_added_up_in_the_dtype_they_are_reduced_in() -> None:
    mesh = fs.simulated_mesh(2)
    values = {
        "a.w": THIRDS,
        "b.w": THIRDS.clone(),
        "b.n": torch.tensor(3),
        "c.z": torch.zeros(2, dtype=torch.complex64),
    }
    policies = {"a": fs.MixedPrecision(BF16, F32), "b": fs.MixedPrecision(BF16), "c": fs.MixedPrecision(BF16, F32)}
    layout = fs.plan(values, mesh, precision=policies.get, reduction="sum")

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
    nothing = fs.Full(dict.fromkeys(values), layout)
    some = fs.accumulate(fs.accumulate(None, nothing), first)
    assert_trees_close(fs.accumulate(some, nothing), fs.accumulate(None, first), rtol=0, atol=0)
