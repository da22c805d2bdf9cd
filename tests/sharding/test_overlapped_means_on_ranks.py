"""The mean over replicas while backward goes on: the same bits as at its end, and beside reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import count_collectives
from tests.support.different_units import SMALL, Units, inputs_of
from tests.support.ranks import HYBRID, gloo, on_each

UNITS = 4
BF16 = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLANS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "computed in bfloat16": {"precision": BF16},
    "summed in float16": {"precision": fs.MixedPrecision(torch.float16, torch.float16)},
    "returned in bfloat16": {
        "precision": fs.MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    },
    "axes of other names": {"shard_axis": "replicate", "replicate_axis": "shard"},
    "a parameter on every rank": {"ignored": ["units.1.bias"]},
}
Loss = Callable[[Any, fs.Mesh], Tensor]


def at_end() -> Any:
    """A context in which ``fs.grad`` takes every mean at its end."""
    return patch("functorch_shard.sharding.overlapped_means.overlap_means", lambda *args: None)


def loss_of(full: Any, mesh: fs.Mesh) -> Tensor:
    x = inputs_of(SMALL, mesh.rank, 0).to(next(iter(full.values())).dtype)
    return functional_call(Units(UNITS, SMALL), full, (x, range(UNITS)))


def once(params: Any, mesh: fs.Mesh) -> Tensor:
    return loss_of(fs.gather(params), mesh)


def twice(params: Any, mesh: fs.Mesh) -> Tensor:
    return loss_of(fs.gather(params), mesh) + loss_of(fs.gather(params), mesh).square()


def with_a_norm_of_shards(params: Any, mesh: fs.Mesh) -> Tensor:
    return once(params, mesh) + sum(x.square().sum() for x in params.values())


def of_a_computed_one(params: Any, mesh: fs.Mesh) -> Tensor:
    return once(fs.Sharded({key: 2 * x for key, x in params.items()}, params.layout), mesh)


def in_bfloat16(params: Any, mesh: fs.Mesh) -> Tensor:
    return loss_of(fs.gather(params, dtype=torch.bfloat16), mesh)


def of_each_replica(params: Any, mesh: fs.Mesh) -> Tensor:
    return once(fs.Sharded(params, replace(params.layout, replicate_axis="")), mesh)


LOSSES: dict[str, Loss] = {
    each.__name__: each
    for each in (once, twice, with_a_norm_of_shards, of_a_computed_one, in_bfloat16, of_each_replica)
}


def planned(model: nn.Module, mesh: fs.Mesh, **options: Any) -> fs.Layout:
    return fs.plan(model, mesh, units=[[f"units.{i}"] for i in range(UNITS)], **options)


def assert_same_both_ways(loss: Callable[..., Tensor], mesh: fs.Mesh, *trees: fs.Sharded) -> None:
    """While backward goes on and at its end, with as many all-reduces."""
    gradient = fs.grad(loss, argnums=tuple(range(len(trees))))
    with count_collectives() as seen:
        overlapped = gradient(*trees, mesh)
    with count_collectives() as of_end, at_end():
        expected = gradient(*trees, mesh)
    assert seen["psum"] == of_end["psum"]
    first, second = ([x for tree in each for x in tree.values()] for each in (overlapped, expected))
    for x, y in zip(first, second, strict=True):
        assert x.dtype == y.dtype
        assert x.any()
        assert torch.equal(x, y)


def gradients(mesh: fs.Mesh, kind: str, name: str, dtype: torch.dtype) -> None:
    model = Units(UNITS, SMALL).to(dtype)
    assert_same_both_ways(LOSSES[name], mesh, fs.shard(model, planned(model, mesh, **PLANS[kind])))


@pytest.mark.parametrize("kind", PLANS)
def test_the_means_are_bitwise_those_at_the_end(kind: str) -> None:
    dtype = torch.bfloat16 if kind == "sum" else torch.float32
    gloo(HYBRID)[0].run(gradients, kind, "once", dtype)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "once"])
def test_where_a_gradient_is_more_than_one_reduction_its_mean_is_that_of_the_sum(name: str) -> None:
    gloo(HYBRID)[0].run(gradients, "mean", name, torch.float64)


def in_another_order(a: Any, b: Any, mesh: fs.Mesh) -> Tensor:
    first, second = (a, b) if mesh.rank < 2 else (b, a)
    return once(first, mesh) + once(second, mesh).square()


def one_in_a_replica(a: Any, b: Any, mesh: fs.Mesh) -> Tensor:
    return once(a, mesh) + (once(b, mesh).square() if mesh.rank < 2 else 0)


def with_a_norm_in_a_replica(a: Any, b: Any, mesh: fs.Mesh) -> Tensor:
    return once(a, mesh) + once(b, mesh) + (sum(x.square().sum() for x in b.values()) if mesh.rank < 2 else 0)


def with_hooks(a: Any, b: Any, mesh: fs.Mesh) -> Tensor:
    for x in b.values():
        x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return once(a, mesh) + once(b, mesh)


def with_a_sum(a: Any, b: Any, mesh: fs.Mesh, axes: Any) -> Tensor:
    first, second = (a, b) if mesh.rank < 2 else (b, a)
    return fs.collectives.psum(once(first, mesh), mesh[axes]) * once(second, mesh)


USES: list[Callable[..., Tensor]] = [
    *(in_another_order, one_in_a_replica, with_a_norm_in_a_replica, with_hooks),
    *(partial(with_a_sum, axes=axes) for axes in ("replicate", ("replicate", "shard"))),
]


@on_each(gloo(HYBRID))
def test_replicas_may_use_trees_in_other_orders_and_for_other_things(mesh: fs.Mesh) -> None:
    model = Units(UNITS, SMALL).double()
    a = fs.shard(model, planned(model, mesh))
    b = fs.Sharded({key: x.cos() for key, x in a.items()}, a.layout)
    for loss in USES:
        assert_same_both_ways(loss, mesh, a, b)


@on_each(gloo(HYBRID))
def test_each_all_reduce_is_under_way_while_the_unit_in_front_is_reduced(mesh: fs.Mesh) -> None:
    events: list[str] = []

    @fs.communication.wrap
    def watched(op: Any, x: Tensor, send: Any) -> Any:
        events.append(f"start {op.kind} {op.key}")

        def finished(result: Tensor) -> Tensor:
            events.append(f"wait {op.kind} {op.key}")
            return result

        return send(op, x).then(finished)

    model = Units(UNITS, SMALL)
    params = fs.shard(model, planned(model, mesh))
    params = fs.Sharded(params, params.layout.on(mesh.with_backend(watched)))
    fs.grad(once)(params, mesh)
    for i in range(1, UNITS):
        start, wait = (events.index(f"{what} psum units.{i}") for what in ("start", "wait"))
        assert events.index(f"wait psum_scatter units.{i}") < start
        assert start < events.index(f"start psum_scatter units.{i - 1}") < wait
