"""What Jacobians by sharded parameters are: tangents are set on all ranks at once, cotangents on each by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev

import functorch_shard as fs
from functorch_shard.collectives import all_gather
from tests.support.ranks import gloo, on_each, rows_of, simulated

KINDS = [*simulated(2, 3), *gloo(2)]
NUMEL = 5


def setting(mesh: fs.Mesh) -> tuple[fs.Sharded, Tensor]:
    """Parameters, and for each rank the gradient of its own loss by the whole of them, padded."""
    whole = {"w": torch.linspace(-1, 1, NUMEL, dtype=torch.float64)}
    params = fs.shard(whole, fs.plan(whole, mesh))
    rows = torch.randn(mesh.size, NUMEL, generator=torch.Generator().manual_seed(0)).double()
    return params, rows_of(mesh, rows)


def only(tree: Any) -> Any:
    """The value of the one buffer."""
    (x,) = tree.values()
    return x


def in_shards(x: Tensor, mesh: fs.Mesh) -> Tensor:
    """Rank by rank, the elements of its shard."""
    shard_numel = -(-NUMEL // mesh.size)
    return torch.nn.functional.pad(x, (0, shard_numel * mesh.size - NUMEL)).unflatten(-1, (mesh.size, shard_numel))


def loss(params: fs.Sharded, x: Tensor) -> Tensor:
    return (fs.gather(params)["w"] * x).sum()


@on_each(KINDS)
def test_a_column_of_jacfwd_is_the_sum_of_those_of_all_ranks(mesh: fs.Mesh) -> None:
    params, rows = setting(mesh)

    @mesh.spmd
    def difference(params: fs.Sharded, x: Tensor) -> Any:
        return only(jacfwd(loss)(params, x)) - in_shards(x, mesh).sum(0)

    assert difference(params, rows).abs().max() < 1e-12


@on_each(KINDS)
def test_jacrev_is_the_mean_over_ranks_of_its_own_columns(mesh: fs.Mesh) -> None:
    params, rows = setting(mesh)

    @mesh.spmd
    def difference(params: fs.Sharded, x: Tensor) -> Any:
        every = all_gather(x[None], mesh).mean(0)
        return only(jacrev(loss)(params, x)) - in_shards(every, mesh)[fs.collectives.axis_index(mesh)]

    assert difference(params, rows).abs().max() < 1e-12


def cubic(params: fs.Sharded, x: Tensor) -> Tensor:
    return (fs.gather(params)["w"].pow(3) * x).sum()


@on_each(KINDS)
def test_a_column_of_hessian_is_a_product_with_the_sum_of_basis_vectors(mesh: fs.Mesh) -> None:
    params, rows = setting(mesh)

    @mesh.spmd
    def difference(params: fs.Sharded, x: Tensor) -> Any:
        numel = only(params).shape[0]
        columns = []
        for i in range(numel):
            basis = fs.Sharded(
                {key: torch.zeros_like(p) + torch.eye(numel)[i] for key, p in params.items()}, params.layout
            )
            product = torch.func.jvp(fs.grad(lambda p: cubic(p, x)), (params,), (basis,))[1]
            columns.append(only(product))
        return only(only(hessian(cubic)(params, x))) - torch.stack(columns, -1)

    assert difference(params, rows).abs().max() < 1e-12
