"""Gradients in mixed precision: bitwise the same on gloo and simulated ranks, and what is kept and added up in it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import Ranks, gloo, rows_of
from tests.support.refusals import refused

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES: dict[str, tuple[int, ...]] = {
    "a.w": (3, 5),
    "a.s": (),
    "b.no": (0, 3),
    "b.w": (7,),
    "c.big": (1001, 37),
    "d.half": (5, 31),
    "d.low": (3, 17),
}
STORED = {"d.half": (F16, 1e-3), "d.low": (BF16, 1.0)}  # others in float32; and what keeps products in range
FROZEN = {"b.n": torch.tensor([3, 2**20 + 1]), "c.mask": torch.tensor([True, False, True])}
POLICIES: dict[str, Any] = {
    "params": fs.MixedPrecision(BF16),
    "params, exact sums": fs.MixedPrecision(BF16, F32),
    "halves": fs.MixedPrecision(F16, BF16),
    "sums in halves": fs.MixedPrecision(BF16, F16),  # divided before and after
    "low gradients": fs.MixedPrecision(BF16, keep_low_precision_grads=True),
    "by unit": {
        "a": fs.MixedPrecision(BF16, F32),
        "c": fs.MixedPrecision(None, F16, keep_low_precision_grads=True),
    }.get,
}


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=generator)
        return x * torch.tensor([1e-3, 1.0, 1e3])[torch.randint(3, shape, generator=generator)]

    wide = {name: draw(shape) for name, shape in SHAPES.items()}
    return {name: (x * STORED[name][1]).to(STORED[name][0]) if name in STORED else x for name, x in wide.items()}


def samples(mesh: fs.Mesh) -> Any:
    """Different numbers for every rank."""
    rows = [values(7 + rank) for rank in range(mesh.size)]
    return rows_of(mesh, {name: torch.stack([row[name] for row in rows]) for name in SHAPES})


def loss(params: fs.Sharded, frozen: fs.Sharded, x: dict[str, Tensor], lazy: bool | None = None) -> Tensor:
    """Elementwise, so that one rank at a time computes the same bits as all of them side by side."""
    full = fs.gather(params, frozen, lazy=lazy)
    terms = [(full[name] * x[name].to(full[name].dtype) * full["b.n"][0]).square().float().sum() for name in SHAPES]
    return torch.stack(terms).sum()


def derivatives(mesh: fs.Mesh, policies: dict[str, bool | None]) -> dict[str, dict[str, Any]]:
    return {name: derivatives_of(mesh, POLICIES[name], lazy) for name, lazy in policies.items()}


def derivatives_of(mesh: fs.Mesh, precision: Any, lazy: bool | None) -> dict[str, Any]:
    given = {**values(0), **FROZEN}
    params, frozen = fs.partition(fs.shard(given, fs.plan(given, mesh, precision=precision)))
    of = partial(loss, lazy=lazy)

    def of_two(p: fs.Sharded, f: fs.Sharded, x: dict[str, Tensor]) -> fs.Sharded:
        two = {name: torch.stack([row, 3 * row]) for name, row in x.items()}
        return vmap(grad(of), (None, None, 0))(p, f, two)

    def tangent(p: fs.Sharded, f: fs.Sharded, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return jvp(lambda p: dict(fs.gather(p, f, lazy=lazy)), (p,), (p,))[1]

    ways = {"fs.grad": fs.grad(of), "grad": grad(of), "vmap": of_two, "jvp": tangent}
    return {name: dict(mesh.spmd(way)(params, frozen, samples(mesh))) for name, way in ways.items()}


def assert_bitwise_simulated(ranks: Ranks, policies: dict[str, bool | None]) -> None:
    expected = ranks.simulated.run(derivatives, dict.fromkeys(policies))
    assert_trees_close(ranks.run(derivatives, policies), expected, rtol=0, atol=0)


@pytest.mark.parametrize("lazy", [None, False])
@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_lazy_and_plain_gathers_give_bitwise_what_simulated_ranks_do(ranks: Ranks, lazy: bool | None) -> None:
    assert_bitwise_simulated(ranks, dict.fromkeys(POLICIES, lazy))


THIRDS = torch.arange(1, 8) / 3  # no bfloat16 holds one of the 3rds


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
    for wrong in ((None, dict(first)), (dict(first), first), (fs.shard(values, layout), first)):
        assert refused(fs.accumulate, *wrong).startswith("TypeError: accumulate: ")
