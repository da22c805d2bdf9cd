"""Options of a step are numbers: tensors are refused, and a recorded step has those of its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import loss_of, two_layers
from tests.support.ranks import gloo, on_each, sequential, simulated

CLASSES = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {}),
    "whole": (torch.optim.Adafactor, {"whole": True}),
}


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    return x, y


def training(mesh: fs.Mesh, case: str) -> tuple[fs.Sharded, Any, Callable[..., Any]]:
    """Parameters, state, and a step that takes a learning rate."""
    model, (cls, options) = two_layers().double(), CLASSES[case]
    params, opt = fs.shard(model, fs.plan(model, mesh)), fs.optimizer(cls, lr=1.0, **options)

    def step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor, lr: Any) -> Any:
        grads = fs.grad(lambda params: loss_of(model, fs.gather(params), x, y))(params)
        return opt.step(params, grads=grads, state=state, lr=lr)

    return params, opt.init(params), step


def test_options_other_than_the_rate_are_in_the_optimizer_of_a_recorded_step_or_refused() -> None:
    mesh = fs.simulated_mesh(2)
    model, (x, y) = two_layers().double(), mesh.split(samples())
    params = fs.shard(model, fs.plan(model, mesh))

    @mesh.spmd
    def step(opt: Any, params: fs.Sharded, state: Any, x: Tensor, y: Tensor, options: Any) -> Any:
        grads = fs.grad(lambda params: loss_of(model, fs.gather(params), x, y))(params)
        return opt.step(params, grads=grads, state=state, lr=0.5, **options)

    options: Any = {"betas": (0.8, 0.9)}
    opt, recorded = fs.optimizer(torch.optim.AdamW), fs.compile(step, backend="replay")
    with pytest.raises(NotImplementedError):
        recorded(opt, params, opt.init(params), x, y, options)
    opt = fs.optimizer(torch.optim.AdamW, **options)
    args = opt, params, opt.init(params), x, y, {}
    assert_trees_close(recorded(*args), step(*args))


RATE = torch.tensor(0.1, dtype=torch.float64)
PROGRAMS: list[Any] = [
    lambda after: after(RATE),
    lambda after: after((RATE, 0.9)),
    lambda after: torch.func.vmap(after)(RATE[None]),
    lambda after: fs.grad(after)(RATE),
    lambda after: torch.func.grad(after)(RATE),
    lambda after: torch.func.jvp(after, (RATE,), (RATE,)),
]


@on_each([*simulated(2), *sequential(2), *gloo(2)])
def test_a_tensor_for_a_rate_is_refused_and_has_no_derivative_that_is_zero(mesh: fs.Mesh) -> None:
    for case, program in product(CLASSES, PROGRAMS):
        refused(mesh, *training(mesh, case), program)


def refused(mesh: fs.Mesh, params: fs.Sharded, state: Any, step: Callable[..., Any], program: Any) -> None:
    def by_rate(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        return program(lambda lr: fs.global_norm(step(params, state, x, y, lr)[0]))

    with pytest.raises(TypeError, match="'lr': got a tensor, expected a number"):
        mesh.spmd(by_rate)(params, state, *mesh.split(samples()))


def test_all_ranks_have_one_step_count() -> None:
    mesh = fs.simulated_mesh(2)
    params, state, step = training(mesh, "adamw")
    state["step"] = fs.Sharded(dict.fromkeys(state["step"], torch.tensor([0.0, 1.0])), params.layout)
    with pytest.raises(ValueError, match="step: one step updates all ranks, and all rows of a vmap, with the same"):
        mesh.spmd(step)(params, state, *mesh.split(samples()), 0.1)
