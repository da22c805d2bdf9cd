"""Gradients of each replica first, and of all of them later: the halves are those of the plain reduction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward, loss_of, two_layers

GRIDS: list[dict[str, int]] = [{"replicate": 2, "shard": 2}, {"replicate": 2, "shard": 4}, {"shard": 3, "replicate": 2}]
every_grid = pytest.mark.parametrize("axes", GRIDS, ids=str)
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "whole on every rank": {"ignored": ["2"]},
    "axes of other names": {"shard_axis": "replicate", "replicate_axis": "shard"},
}


def gradients(params: fs.Sharded, x: Tensor, y: Tensor) -> fs.Sharded:
    """On every rank of the mesh, which has another row of ``x`` and ``y`` each."""
    model = two_layers().double()
    return params.layout.mesh.spmd(fs.grad(lambda p, x, y: loss_of(model, fs.gather(p), x, y)))(params, x, y)


def start(axes: dict[str, int], **options: Any) -> tuple[fs.Sharded, Tensor, Tensor]:
    mesh, model = fs.simulated_mesh(axes), two_layers().double()
    torch.manual_seed(1)
    x, y = mesh.split((torch.randn(2 * mesh.size, 5).double(), torch.randn(2 * mesh.size, 3).double()))
    return fs.shard(model, fs.plan(model, mesh, **options)), x, y


@every_grid
@pytest.mark.parametrize("options", OPTIONS)
def test_both_halves_together_are_the_plain_reduction(options: str, axes: dict[str, int]) -> None:
    params, x, y = start(axes, **OPTIONS[options])
    apart = gradients(fs.replicas.within_replicas(params), x, y)
    together = fs.replicas.across_replicas(apart, params.layout)
    expected = gradients(params, x, y)
    assert together.layout == expected.layout == params.layout
    assert_trees_close(dict(together), dict(expected), rtol=1e-12, atol=1e-14)
    assert not torch.allclose(apart["0"], expected["0"])


def test_each_replica_has_the_gradient_of_its_own_samples_before_that() -> None:
    params, x, y = start({"replicate": 2, "shard": 3})
    apart = gradients(fs.replicas.within_replicas(params), x, y)
    model, inner = two_layers().double(), fs.simulated_mesh(3)
    alone = fs.shard(model, fs.plan(model, inner))
    for replica in range(2):
        expected = gradients(alone, x[replica], y[replica])
        assert_trees_close({key: g[replica] for key, g in apart.items()}, dict(expected), rtol=1e-12, atol=1e-14)


def test_full_gradients_are_scattered_within_replicas_too() -> None:
    params, x, y = start({"replicate": 2, "shard": 2})
    mesh, model = params.layout.mesh, two_layers().double()

    @mesh.spmd
    def by_hand(params: fs.Sharded, x: Tensor, y: Tensor) -> fs.Sharded:
        full = fs.gather(fs.replicas.within_replicas(params))
        apart = fs.scatter_grads(fs.grad(lambda full: loss_of(model, full, x, y))(full))
        return fs.replicas.across_replicas(apart, params.layout)

    with count_collectives() as seen:
        grads = by_hand(params, x, y)
    assert dict(seen.by_kind) == {"all_gather": 2, "psum_scatter": 2, "psum": 2}
    assert_trees_close(dict(grads), dict(gradients(params, x, y)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("keep", [False, True])
def test_replicas_are_added_up_in_the_dtype_of_the_policy(keep: bool) -> None:
    """256 and three times 1: in bfloat16 each 1 would be lost beside the 256."""
    policy = fs.MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=keep)
    mesh = fs.simulated_mesh({"replicate": 4, "shard": 2})
    values = {"u.w": torch.zeros(2, dtype=torch.bfloat16)}
    layout = fs.plan(values, mesh, precision=policy, reduction="sum")
    apart = torch.tensor([256.0, 1.0, 1.0, 1.0]).view(4, 1, 1).expand(4, 2, 1)
    within = fs.replicas.within_replicas(fs.shard(values, layout)).layout
    with count_collectives() as seen:
        grads = fs.replicas.across_replicas(fs.Sharded({"u": apart}, within), layout)
    assert seen.nbytes("psum") == 4  # one element of float32
    assert grads["u"].dtype == (torch.float32 if keep else torch.bfloat16)
    assert (grads["u"] == (259.0 if keep else 260.0)).all()  # 260 is the bfloat16 next to 259


def test_sums_of_float16_are_divided_before_and_after() -> None:
    """Four replicas of 30000 each: their sum is more than float16 has."""
    policy = fs.MixedPrecision(torch.float16, torch.float16)
    mesh = fs.simulated_mesh({"replicate": 4, "shard": 2})
    layout = fs.plan({"u.w": torch.zeros(2)}, mesh, precision=policy)
    params = fs.replicas.within_replicas(fs.shard({"u.w": torch.zeros(2)}, layout))
    apart = fs.Sharded({"u": torch.full((4, 2, 1), 30000.0)}, params.layout)
    assert (fs.replicas.across_replicas(apart, layout)["u"] == 30000.0).all()


def test_frozen_buffers_and_those_without_a_gradient_stay_none() -> None:
    mesh, model = fs.simulated_mesh({"replicate": 2, "shard": 2}), awkward()
    params = fs.shard(model, fs.plan(model, mesh))
    x, y = mesh.split((torch.randn(8, 5).double(), torch.randn(8, 3).double()))
    gradient = mesh.spmd(fs.grad(lambda p, x, y: loss_of(model, fs.gather(p), x, y)))
    together = fs.replicas.across_replicas(gradient(fs.replicas.within_replicas(params), x, y), params.layout)
    assert {key for key, g in together.items() if g is None} == {
        key for key, buffer in params.layout.buffers.items() if not buffer.trainable
    }
    assert_trees_close(dict(together), dict(gradient(params, x, y)), rtol=1e-12, atol=1e-14)


def test_without_replicas_nothing_changes_and_nothing_is_sent() -> None:
    params, x, y = start({"shard": 3})
    apart = gradients(fs.replicas.within_replicas(params), x, y)
    with count_collectives() as seen:
        together = fs.replicas.across_replicas(apart, params.layout)
    assert seen.total == 0
    assert_trees_close(dict(together), dict(gradients(params, x, y)), rtol=0, atol=0)


def test_the_second_half_is_linear_and_has_a_derivative() -> None:
    params, x, y = start({"replicate": 2, "shard": 2})
    within = fs.replicas.within_replicas(params)
    v, model = {key: torch.randn_like(p) for key, p in params.items()}, two_layers().double()

    def total(way: str) -> Any:
        def gradient(p: fs.Sharded, x: Tensor, y: Tensor) -> fs.Sharded:
            grad = torch.func.grad(lambda p: loss_of(model, fs.gather(p), x, y))
            return (
                grad(p)
                if way == "plain"
                else fs.replicas.across_replicas(grad(fs.replicas.within_replicas(p)), p.layout)
            )

        return params.layout.mesh.spmd(lambda p, v, x, y: torch.func.jvp(lambda p: gradient(p, x, y), (p,), (v,))[1])

    args = params, fs.Sharded(v, params.layout), x, y
    assert_trees_close(dict(total("halves")(*args)), dict(total("plain")(*args)), rtol=1e-11, atol=1e-13)
    doubled = fs.Sharded({key: 2 * g for key, g in gradients(within, x, y).items()}, within.layout)
    expected = {key: 2 * g for key, g in gradients(params, x, y).items()}
    assert_trees_close(dict(fs.replicas.across_replicas(doubled, params.layout)), expected, rtol=1e-12, atol=1e-14)


def test_gradients_that_are_reduced_already_are_refused() -> None:
    params, x, y = start({"replicate": 2, "shard": 2})
    with pytest.raises(ValueError, match="Differentiate by within_replicas") as told:
        fs.replicas.across_replicas(gradients(params, x, y), params.layout)
    assert "mean over 'shard' and 'replicate'" in str(told.value)
    with pytest.raises(TypeError, match="got dict and Layout"):
        fs.replicas.across_replicas({}, params.layout)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="within_replicas: params: got dict"):
        fs.replicas.within_replicas({})  # type: ignore[arg-type]


def test_a_step_refuses_gradients_that_replicas_do_not_share_yet() -> None:
    params, x, y = start({"replicate": 2, "shard": 2})
    opt = fs.optimizer(torch.optim.SGD, lr=0.1)
    apart = gradients(fs.replicas.within_replicas(params), x, y)
    with pytest.raises(ValueError, match="grads have a different layout"):
        opt.step(params, grads=apart, state=opt.init(params))
    stepped, _ = opt.step(params, grads=fs.replicas.across_replicas(apart, params.layout), state=opt.init(params))
    assert torch.equal(stepped["0"][0], stepped["0"][1])  # replicas are equal again
    assert copy.deepcopy(stepped).layout == params.layout
