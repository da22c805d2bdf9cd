"""Jacobians by sharded parameters are those of the mean over ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, hessian, jacrev

import functorch_shard as fs
from functorch_shard.collectives import all_gather
from functorch_shard.testing import assert_trees_close
from tests.laws.tasks import Data, whole_of
from tests.support.models import awkward, loss_of
from tests.support.ranks import HYBRID, Ranks, gloo, rows_of, simulated, slow
from tests.support.refusals import refused

NUMEL = 5
MODEL = awkward()


def setting(mesh: fs.Mesh) -> tuple[fs.Sharded, Tensor]:
    """Parameters, and for each rank the gradient of its own loss by the whole of them, padded."""
    whole = {"w": torch.linspace(-1, 1, NUMEL, dtype=torch.float64)}
    params = fs.shard(whole, fs.plan(whole, mesh))
    rows = torch.randn(mesh.size, NUMEL, generator=torch.Generator().manual_seed(0)).double()
    return params, rows_of(mesh, rows)


def loss(params: fs.Sharded, x: Tensor) -> Tensor:
    return (fs.gather(params)["w"] * x).sum()


# Of the awkward model, with frozen, tied, scalar and empty parameters.
ANY_RANKS = [*simulated(3), *gloo(2), *slow([*simulated(1, HYBRID), *gloo(HYBRID)])]


def outputs(p: Any, x: Tensor) -> dict[str, Tensor]:
    out = functional_call(MODEL, p, (x,))
    return {"out": out, "norm": out.square().sum()}


def jacobians(mesh: fs.Mesh, by: str, chunk_size: int | None, reduction: Any) -> Any:
    params = fs.shard(MODEL, fs.plan(MODEL, mesh, reduction=reduction))
    x, y = mesh.split(tuple(rows.flatten(0, 1) for rows in Data(mesh.size).samples()))

    def derived(p: fs.Sharded, x: Tensor, y: Tensor) -> Any:
        if by == "hessian":
            return dict(fs.hessian(lambda x, p: loss_of(MODEL, fs.gather(p), x, y), 1, chunk_size=chunk_size)(x, p))
        return getattr(fs, by)(lambda p, x: outputs(fs.gather(p), x), chunk_size=chunk_size)(p, x)

    return mesh.spmd(derived)(params, x, y)


@cache
def expected_jacobians(num_ranks: int, by: str, reduction: str) -> Any:
    trainable, frozen = Data(num_ranks).parameters()
    rows = zip(*Data(num_ranks).samples(), strict=True)
    if by == "hessian":
        each = [hessian(lambda p: loss_of(MODEL, {**p, **frozen}, x, y))(trainable) for x, y in rows]  # noqa: B023
    else:
        each = [jacrev(lambda p: outputs({**p, **frozen}, x))(trainable) for x, _ in rows]  # noqa: B023
    scale = num_ranks if reduction == "mean" else 1
    tree_map: Any = optree.tree_map
    return tree_map(lambda *xs: sum(xs[1:], xs[0]) / scale, *each)


def with_whole_columns(trees: list[fs.Sharded]) -> dict[str, Tensor]:
    """Leaves (rows.., shard) of each rank to rows and whole columns, by name."""
    layout = trees[0].layout
    return whole_of(fs.Sharded({key: torch.stack([tree[key] for tree in trees]) for key in trees[0]}, layout))


WAYS = [("jacrev", None, "mean"), ("jacrev", 2, "mean"), ("hessian", 7, "mean"), ("jacfwd", None, "mean")]
WAYS += [("jacrev", None, "sum"), ("jacfwd", None, "sum"), ("hessian", None, "sum")]


@pytest.mark.parametrize("ranks", ANY_RANKS, ids=str)
@pytest.mark.parametrize(("by", "chunk_size", "reduction"), WAYS)
def test_jacobians_are_those_of_the_mean_or_the_sum_over_ranks(
    by: str, chunk_size: int | None, reduction: str, ranks: Ranks
) -> None:
    results = ranks.run(jacobians, by, chunk_size, reduction)
    expected = expected_jacobians(ranks.size, by, reduction)
    for name in expected:
        whole = with_whole_columns([result[name] for result in results])
        assert_trees_close(whole, dict(expected[name]), rtol=1e-10, atol=1e-11)


def rows_of_every_rank(mesh: fs.Mesh) -> Any:
    params, rows = setting(mesh)

    def every(p: fs.Sharded, x: Tensor) -> Tensor:
        return all_gather((fs.gather(p)["w"] * x).sum()[None], mesh)

    return mesh.spmd(fs.jacrev(every))(params, rows), rows


@pytest.mark.parametrize("ranks", [*simulated(3), *gloo(2)], ids=str)
def test_gathered_outputs_have_a_row_for_each_rank(ranks: Ranks) -> None:
    results = ranks.run(rows_of_every_rank)
    whole = with_whole_columns([tree for tree, _ in results])["w"]
    assert_trees_close(whole, torch.stack([row for _, row in results]), rtol=1e-12, atol=1e-12)


def test_what_has_no_jacobian_by_shards_is_refused() -> None:
    mesh = fs.simulated_mesh(2)
    params, rows = setting(mesh)
    assert "Call the function under mesh.spmd" in refused(fs.jacrev(loss), params, rows)
    assert "jacfwd: got Tensor, expected a Sharded" in refused(mesh.spmd(fs.jacfwd(lambda x: x)), rows)
    assert "Return fs.gather(...) of it" in refused(mesh.spmd(fs.jacrev(fs.grad(loss))), params, rows)
