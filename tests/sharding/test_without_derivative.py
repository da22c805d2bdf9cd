"""What makes new memory has no derivative: it is refused and never zero, beside another use of the parameters too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import optree
import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from tests.support.ranks import gloo, on_each, sequential, simulated

LOSSES: dict[str, Callable[[fs.Sharded], Tensor]] = {
    "shard": lambda params: fs.global_norm(fs.shard({"w": fs.gather(params, lazy=False)["w"] * 2}, params.layout)),
    "from_vector": lambda params: fs.global_norm(
        fs.curvature.from_vector(fs.curvature.to_vector(params) * 2, params.layout)
    ),
}
DERIVATIVES: list[Any] = [
    lambda loss, params: fs.grad(loss)(params),
    lambda loss, params: torch.func.grad(loss)(params),
    lambda loss, params: torch.func.jvp(loss, (params,), (params,))[1],
]


def of(mesh: fs.Mesh) -> fs.Sharded:
    values = {"w": torch.arange(1.0, 6.0, dtype=torch.float64)}
    return fs.shard(values, fs.plan(values, mesh))


@on_each([*simulated(2, {"replicate": 2, "shard": 2}), *sequential(2), *gloo(2)])
def test_the_derivative_of_new_shards_is_refused_and_never_zero(mesh: fs.Mesh) -> None:
    for derivative in DERIVATIVES:
        for name, loss in LOSSES.items():
            with pytest.raises(NotImplementedError, match=rf"{name}: .* no derivative by"):
                mesh.spmd(lambda params, d=derivative, f=loss: d(lambda p: fs.global_norm(p) + f(p), params))(of(mesh))


BETWEEN_STEPS: dict[str, Callable[[fs.Sharded], Any]] = {
    "offload": lambda params: sum(x.sum() for x in fs.offload(params, "cpu").values()),
    "reshard": lambda params: sum(x.sum() for x in fs.reshard(params, params.layout).values()),
}


@on_each([*simulated(2, {"replicate": 2, "shard": 2}), *sequential(2), *gloo(2)])
def test_what_is_called_between_steps_is_refused_in_a_loss_and_never_a_constant(mesh: fs.Mesh) -> None:
    for name, value in BETWEEN_STEPS.items():
        for derivative in DERIVATIVES:
            with pytest.raises(RuntimeError, match=rf"{name}.*: .*(Call it outside|no derivative by)"):
                mesh.spmd(lambda params, d=derivative, f=value: d(lambda p: fs.global_norm(p) + f(p), params))(of(mesh))


@on_each([*gloo(2)])
def test_of_constants_it_may_be_called_in_a_loss(mesh: fs.Mesh) -> None:
    constant = of(mesh)

    def loss(params: fs.Sharded) -> Tensor:
        with torch.no_grad():
            values = [value(params) for value in BETWEEN_STEPS.values()]
        detached: Any = optree.tree_map(Tensor.detach, cast(Any, params))
        values += [value(x) for x in (constant, detached) for value in BETWEEN_STEPS.values()]
        return fs.curvature.vdot(params, params) + sum(values)

    grads = fs.gather(fs.grad(loss)(of(mesh)), lazy=False)
    assert torch.equal(grads["w"], 2 * torch.arange(1.0, 6.0, dtype=torch.float64))
