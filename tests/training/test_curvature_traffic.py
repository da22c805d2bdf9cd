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
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, simulated, slow

Loss = Callable[[fs.Sharded, Tensor], Tensor]


def model_of_units() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))).double()


MODEL = model_of_units()


def loss_with(**gather: Any) -> Loss:
    return lambda p, x: functional_call(MODEL, fs.gather(p, **gather), (x,)).square().mean()


def through_a_step(p: fs.Sharded, x: Tensor) -> Tensor:
    grads = fs.grad(loss_with())(p, x)
    return loss_with()(fs.Sharded({key: p[key] - 0.1 * g for key, g in grads.items()}, p.layout), x)


def with_a_penalty(p: fs.Sharded, x: Tensor) -> Tensor:
    return loss_with()(p, x) + sum((w**4).sum() for w in p.values())


def twice(p: fs.Sharded, x: Tensor) -> Tensor:
    return loss_with()(p, x) * loss_with()(p, 2 * x)


LOSSES: dict[str, Loss] = {
    "lazy": loss_with(),
    "at once": loss_with(lazy=False),
    "through a step": through_a_step,
    "with a penalty on shards": with_a_penalty,
    "gathered twice": twice,
    "remat": fs.remat(loss_with()),
}
DERIVED: dict[str, Callable[[Loss, fs.Sharded, fs.Sharded, Tensor], Any]] = {
    "gradient": lambda loss, p, v, x: fs.grad(loss)(p, x),
    "hessian": lambda loss, p, v, x: hessian(loss)(p, x) @ v,
    "jvp of fs.grad": lambda loss, p, v, x: jvp(lambda p: fs.grad(loss)(p, x), (p,), (v,))[1],
    "fs.grad of jvp": lambda loss, p, v, x: fs.grad(lambda p: jvp(lambda p: loss(p, x), (p,), (v,))[1])(p),
    "fs.grad of fs.grad": lambda loss, p, v, x: fs.grad(lambda p: fs.vdot(fs.grad(loss)(p, x), v))(p),
}
# Further derivatives, by the product that is differentiated.
FURTHER: dict[str, Callable[[Any, fs.Sharded, fs.Sharded], Any]] = {
    "fs.grad": lambda product, p, v: fs.grad(lambda p: fs.vdot(product(p), v))(p),
    "jvp": lambda product, p, v: jvp(product, (p,), (v,))[1],
    "hessian": lambda product, p, v: hessian(lambda p: fs.vdot(product(p), v))(p) @ v,
    "vmap": lambda product, p, v: torch.func.vmap(lambda a: [a * x for x in product(p).values()])(torch.ones(2)),
}


def derived(mesh: fs.Mesh, name: str, loss: str, further: str, plan: dict[str, Any]) -> Any:
    """The result, and how often each unit was communicated."""
    params = fs.shard(MODEL, fs.plan(MODEL, mesh, **plan))
    v, x = (
        fs.randn_like(params, 0),
        mesh.split(torch.linspace(-1, 1, 24 * mesh.size, dtype=torch.float64).unflatten(0, (-1, 6))),
    )

    def of(p: fs.Sharded, v: fs.Sharded, x: Tensor) -> Any:
        product = lambda p: DERIVED[name](LOSSES[loss], p, v, x)  # noqa: E731
        return FURTHER[further](product, p, v) if further else product(p)

    with count_collectives() as seen:
        result = mesh.spmd(of)(params, v, x)
    return result, Counter((each.kind, each.key) for each in seen.issued)


def product_of(mesh: fs.Mesh, name: str, loss: str) -> Any:
    return derived(mesh, name, loss, "", {})


def counted(ranks: Ranks, name: str, loss: str) -> dict[str, Counter[str]]:
    """By kind, by unit; of the first rank, as all have the same."""
    first, *others = (each for _, each in ranks.once(product_of, name, loss))
    assert all(other == first for other in others)
    kinds = {kind for kind, _ in first}
    return {kind: Counter({key: n for (k, key), n in first.items() if k == kind and key}) for kind in kinds}


KINDS = [*simulated(1, 2, HYBRID), *sequential(2), *gloo(2, HYBRID)]
every_kind = pytest.mark.parametrize("ranks", KINDS, ids=str)
plain_losses = pytest.mark.parametrize("loss", ["lazy", "at once"])


def doubled(numbers: Counter[str]) -> Counter[str]:
    return numbers + numbers


@every_kind
@plain_losses
def test_a_hessian_product_gathers_parameters_and_vector_and_reduces_each_unit_once(loss: str, ranks: Ranks) -> None:
    gradient, product = counted(ranks, "gradient", loss), counted(ranks, "hessian", loss)
    assert product.keys() == gradient.keys()
    for kind, numbers in gradient.items():
        assert product[kind] == (doubled(numbers) if kind == "all_gather" else numbers), kind


@every_kind
@plain_losses
def test_reverse_over_forward_communicates_as_little(loss: str, ranks: Ranks) -> None:
    assert counted(ranks, "fs.grad of jvp", loss) == counted(ranks, "hessian", loss)


@every_kind
@plain_losses
def test_jvp_of_a_gradient_returns_both_and_so_reduces_both(loss: str, ranks: Ranks) -> None:
    gradient, product = counted(ranks, "gradient", loss), counted(ranks, "jvp of fs.grad", loss)
    assert product == {kind: doubled(numbers) for kind, numbers in gradient.items()}


EVERY = [*simulated(2), *gloo(2), *slow([*sequential(2), *simulated(HYBRID), *gloo(HYBRID)])]


@pytest.mark.parametrize("ranks", EVERY, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_product_is_bitwise_that_of_jvp_which_reduces_the_gradient_too(loss: str, ranks: Ranks) -> None:
    both = [ranks.once(product_of, name, loss) for name in ("hessian", "jvp of fs.grad")]
    for (product, few), (expected, many) in zip(*both, strict=True):
        assert_trees_close(product, expected, rtol=0, atol=0)
        assert all(x.any() for x in product.values())
        assert few <= many


LOW = fs.MixedPrecision(reduce_dtype=torch.float32)
PLANS: list[dict[str, Any]] = [
    {"reduction": "sum"},
    {"precision": LOW},
    {"labels": lambda name, p: name[-1]},
    {"units": 1},
    {"reshard_after_forward": False},
]


@pytest.mark.parametrize("loss", ["lazy", "at once"])
@pytest.mark.parametrize("plan", range(len(PLANS)))
def test_so_it_is_with_every_plan(plan: int, loss: str) -> None:
    mesh = fs.simulated_mesh({"replicate": 2, "shard": 3})
    (product, few), (expected, _) = (derived(mesh, name, loss, "", PLANS[plan]) for name in ("hessian", JVP))
    gradient = derived(mesh, "gradient", loss, "", PLANS[plan])[1]
    assert_trees_close(product, expected, rtol=0, atol=0)
    assert {key: n for key, n in few.items() if key[0] != "all_gather"} == {
        key: n for key, n in gradient.items() if key[0] != "all_gather"
    }


JVP = "jvp of fs.grad"


@pytest.mark.parametrize("ranks", [*simulated(2), *gloo(2)], ids=str)
@pytest.mark.parametrize("further", FURTHER)
def test_a_product_is_differentiated_and_batched_in_turn(further: str, ranks: Ranks) -> None:
    both = [ranks.run(derived, name, "lazy", further, {}) for name in ("hessian", JVP)]
    for (product, few), (expected, many) in zip(*both, strict=True):
        assert_trees_close(product, expected, rtol=1e-10, atol=1e-13)
        assert sum(few.values()) < sum(many.values())
