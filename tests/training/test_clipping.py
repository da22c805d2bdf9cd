"""Clipping on simulated and on gloo ranks: that of torch on whole tensors, and of FSDP2."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import loss_of, two_layers
from tests.support.norms import (
    F64,
    FROZEN,
    INF,
    NAN,
    POWERS,
    clipped_by_torch,
    first,
    sharded,
    spoiled,
    spoiled_values,
    tolerance,
    values,
)
from tests.support.ranks import HYBRID, Ranks, gloo, simulated
from tests.support.steps import copied

every_power = pytest.mark.parametrize("p", POWERS)


@pytest.mark.parametrize(
    ("axes", "max_norm", "dtypes"),
    [
        (HYBRID, 1.0, "float64"),
        (HYBRID, 0.0, "float32"),
        ({"shard": 3}, 1.0, "complex"),
        ({"shard": 3}, 1e6, "float64"),
    ],
    ids=str,
)
@every_power
def test_clipping_is_that_of_torch(axes: dict[str, int], max_norm: float, dtypes: str, p: float) -> None:
    mesh = fs.simulated_mesh(axes)
    tree = sharded(mesh, dtypes, "b whole")
    expected, norm = clipped_by_torch(values(dtypes), max_norm, p)
    before = copied(tree)
    for run in (lambda fn: fn, mesh.spmd):
        clipped, actual = run(lambda tree: fs.clip_by_global_norm(tree, max_norm, p))(tree)
        assert_trees_close(actual if actual.ndim == 0 else first(actual, mesh), norm, **tolerance(dtypes))
        assert_trees_close(dict(fs.gather(clipped)), {**expected, **FROZEN}, **{**tolerance(dtypes), "atol": 1e-30})
        assert_trees_close(tree, before, rtol=0, atol=0)


def test_clipping_keeps_every_dtype() -> None:
    mesh = fs.simulated_mesh(3)
    tree = sharded(mesh, "mixed with float64", "b whole")
    for run in (lambda fn: fn, mesh.spmd):
        clipped, norm = run(lambda tree: fs.clip_by_global_norm(tree, 1.0))(tree)
        assert {key: x.dtype for key, x in clipped.items()} == {key: x.dtype for key, x in tree.items()}
        assert norm.dtype == F64
        assert fs.global_norm(clipped) == pytest.approx(1.0, rel=1e-3)  # some are bfloat16


BAD = [{"c.w": {(16, 30): bad}} for bad in (NAN, INF, -INF)]


def clipped_where_bad(mesh: fs.Mesh) -> list[tuple[Tensor, Tensor, fs.Full]]:
    """Norms of trees in which the last rank alone has a NaN or an infinity."""
    results = []
    for bad, p in product(BAD, POWERS):
        tree = spoiled(mesh, bad)
        clipped, norm = mesh.spmd(lambda tree, p=p: fs.clip_by_global_norm(tree, 1.0, p))(tree)
        results.append((norm, mesh.spmd(fs.all_finite)(tree), fs.gather(clipped, lazy=False)))
    return results


@pytest.mark.parametrize("ranks", [*simulated(2), *gloo(2)], ids=str)
def test_a_nan_of_the_last_rank_reaches_all_ranks_as_in_torch(ranks: Ranks) -> None:
    for results in ranks.run(clipped_where_bad):
        for (bad, p), (norm, finite, clipped) in zip(product(BAD, POWERS), results, strict=True):
            given = {n: x for n, x in spoiled_values(bad).items() if n not in FROZEN and x.numel()}
            expected, total_norm = clipped_by_torch(given, 1.0, p)
            assert_trees_close(norm, total_norm)
            assert_trees_close({name: clipped[name] for name in expected}, expected)
            assert not finite


def batch() -> tuple[Tensor, Tensor]:
    return torch.arange(20.0).view(4, 5).sin(), torch.arange(12.0).view(4, 3).cos()


def beside_fsdp2(mesh: fs.Mesh) -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    results = []
    x, y = mesh.split(batch())
    for p in POWERS:
        for max_norm in (1e-2, 1e3):
            theirs = two_layers()
            for layer in (theirs[0], theirs[2], theirs):
                fully_shard(layer)
            ((theirs(x) - y) ** 2).mean().backward()
            total: Any = clip_grad_norm_(theirs.parameters(), max_norm, p)
            sharded_grads: Any = {name: param.grad for name, param in theirs.named_parameters()}
            expected = {name: x.full_tensor() for name, x in sharded_grads.items()}

            ours = two_layers()
            params = fs.shard(ours, fs.plan(ours, mesh))
            grads = fs.grad(lambda params, model, *data: loss_of(model, fs.gather(params), *data))(params, ours, x, y)
            clipped, norm = fs.clip_by_global_norm(grads, max_norm, p)
            results.append((norm, total.full_tensor(), dict(fs.gather(clipped, lazy=False)), expected))
    return results


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_clipping_is_that_of_fsdp2_on_the_same_ranks(ranks: Ranks) -> None:
    for results in ranks.run(beside_fsdp2):
        assert len(results) == 2 * len(POWERS)
        for norm, their_norm, clipped, expected in results:
            assert_trees_close(norm, their_norm, rtol=1e-6, atol=0)
            assert_trees_close(clipped, expected, rtol=1e-5, atol=1e-8)
        scaled = [clipped["0.weight"].norm() for _, _, clipped, _ in results[:2]]
        assert scaled[0] < 0.1 * scaled[1]  # one was clipped, one was not
