"""Options of a step are numbers: tensors are refused, and a recorded step has those of its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import loss_of, two_layers


def training(mesh: fs.Mesh, opt: fs.Optimizer) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step whose optimizer and options are arguments, as a step of ``fs.compile`` takes them, and its arguments."""
    model, x, y = two_layers().double(), torch.arange(60.0).double().view(12, 5).sin(), torch.ones(12, 3).double()
    params = fs.shard(model, fs.plan(model, mesh))

    @mesh.spmd
    def step(opt: Any, params: fs.Sharded, state: Any, x: Tensor, y: Tensor, options: Any) -> Any:
        grads = fs.grad(lambda params: loss_of(model, fs.gather(params), x, y))(params)
        return opt.step(params, grads=grads, state=state, **options)

    return step, (opt, params, opt.init(params), *mesh.split((x, y)))


def test_options_other_than_the_rate_are_in_the_optimizer_of_a_recorded_step_or_refused() -> None:
    options: Any = {"betas": (0.8, 0.9)}
    step, args = training(fs.simulated_mesh(2), fs.optimizer(torch.optim.AdamW, lr=0.5))
    recorded = fs.compile(step, backend="replay")
    with pytest.raises(NotImplementedError):
        recorded(*args, options)
    args = fs.optimizer(torch.optim.AdamW, lr=0.5, **options), *args[1:], {}
    assert_trees_close(recorded(*args), step(*args))


OPTIMIZERS = {"adamw": fs.optimizer(torch.optim.AdamW), "whole": fs.optimizer(torch.optim.Adafactor, whole=True)}
RATE = torch.tensor(0.1, dtype=torch.float64)
PROGRAMS: list[Any] = [
    lambda after: after((RATE, 0.9)),
    lambda after: torch.func.vmap(after)(RATE[None]),
    lambda after: fs.grad(after)(RATE),
    lambda after: torch.func.jvp(after, (RATE,), (RATE,)),
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tensor_for_a_rate_is_refused_and_has_no_derivative_that_is_zero(name: str) -> None:
    opt = OPTIMIZERS[name]
    params = fs.shard({"w": torch.ones(5)}, fs.plan({"w": torch.ones(5)}, fs.simulated_mesh(2)))
    state = opt.init(params)
    after = lambda lr: fs.global_norm(opt.step(params, grads=params, state=state, lr=lr)[0])  # noqa: E731
    for program in PROGRAMS:
        with pytest.raises(TypeError, match="'lr': got a tensor, expected a number"):
            program(after)


def test_all_ranks_have_one_step_count() -> None:
    step, (opt, params, state, *batch) = training(fs.simulated_mesh(2), OPTIMIZERS["adamw"])
    state["step"] = fs.Sharded(dict.fromkeys(state["step"], torch.tensor([0.0, 1.0])), params.layout)
    with pytest.raises(ValueError, match="step: one step updates all ranks, and all rows of a vmap, with the same"):
        step(opt, params, state, *batch, {})
