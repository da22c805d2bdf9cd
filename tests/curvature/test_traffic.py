"""Collectives of Hessian-vector products, counted by unit, beside those of a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

import functorch_shard as fs
from functorch_shard.curvature import hessian
from functorch_shard.testing import count_collectives
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, simulated

Loss = Callable[[fs.Sharded, Tensor], Tensor]


def model_of_units() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))).double()


MODEL = model_of_units()


def loss_with(**gather: Any) -> Loss:
    def loss(p: fs.Sharded, x: Tensor) -> Tensor:
        full: Any = fs.gather(p, **gather)
        return functional_call(MODEL, full, (x,)).square().mean()

    return loss


LOSSES: dict[str, Loss] = {"lazy": loss_with(), "at once": loss_with(lazy=False)}
DERIVED: dict[str, Callable[[Loss, fs.Sharded, fs.Sharded, Tensor], Any]] = {
    "gradient": lambda loss, p, v, x: fs.grad(loss)(p, x),
    "hessian": lambda loss, p, v, x: hessian(loss)(p, x) @ v,
    "fs.grad of jvp": lambda loss, p, v, x: fs.grad(lambda p: jvp(lambda p: loss(p, x), (p,), (v,))[1])(p),
}


def product_of(mesh: fs.Mesh, name: str, loss: str) -> Any:
    """The result, and how often each unit was communicated."""
    params = fs.shard(MODEL, fs.plan(MODEL, mesh))
    v, x = (
        fs.curvature.randn_like(params, 0),
        mesh.split(torch.linspace(-1, 1, 24 * mesh.size, dtype=torch.float64).unflatten(0, (-1, 6))),
    )

    def of(p: fs.Sharded, v: fs.Sharded, x: Tensor) -> Any:
        return DERIVED[name](LOSSES[loss], p, v, x)

    with count_collectives() as seen:
        result = mesh.spmd(of)(params, v, x)
    return result, Counter((each.kind, each.key) for each in seen.issued)


def counted(ranks: Ranks, name: str, loss: str) -> dict[str, Counter[str]]:
    """By kind, by unit; of the first rank, as all have the same."""
    first, *others = (each for _, each in ranks.once(product_of, name, loss))
    assert all(other == first for other in others)
    kinds = {kind for kind, _ in first}
    return {kind: Counter({key: n for (k, key), n in first.items() if k == kind and key}) for kind in kinds}


KINDS = [*simulated(1, 2), *sequential(2), *gloo(HYBRID)]
every_kind = pytest.mark.parametrize("ranks", KINDS, ids=str)


def doubled(numbers: Counter[str]) -> Counter[str]:
    return numbers + numbers


@every_kind
def test_a_hessian_product_takes_the_gathers_and_the_reductions_of_two_gradients(ranks: Ranks) -> None:
    gradient, product = counted(ranks, "gradient", "lazy"), counted(ranks, "hessian", "lazy")
    assert product == {kind: doubled(numbers) for kind, numbers in gradient.items()}


@every_kind
def test_reverse_over_forward_reduces_each_unit_once(ranks: Ranks) -> None:
    gradient, product = counted(ranks, "gradient", "at once"), counted(ranks, "fs.grad of jvp", "at once")
    assert product.keys() == gradient.keys()
    for kind, numbers in gradient.items():
        assert product[kind] == (doubled(numbers) if kind == "all_gather" else numbers), kind
