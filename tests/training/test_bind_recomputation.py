"""What runs a model again in backward: right with bind, refused under functional_call inside fs.grad."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.recomputing import (
    STYLES,
    WITHOUT_REENTRY,
    bound,
    build,
    by_functional_call,
    inputs,
    own_state,
    train,
)
from tests.support.refusals import refused

again = partial(checkpoint, use_reentrant=False)


@pytest.mark.parametrize("style", STYLES)
def test_ten_steps_are_bitwise_those_without_checkpointing(style: str) -> None:
    mesh, model = fs.init_mesh(), build(style, WITHOUT_REENTRY)
    before = own_state(model)
    expected, actual = train(mesh, build(style), bound), train(mesh, model, bound)
    assert expected[0][-1] < expected[0][0]
    assert actual[0] == expected[0]
    assert_trees_close(actual[1], expected[1], rtol=0, atol=0)
    assert own_state(model) == before


@pytest.mark.parametrize("lazy", [None, True])
@pytest.mark.parametrize("style", STYLES)
def test_functional_call_of_them_is_refused_inside_of_grad_and_the_error_names_bind(
    style: str, lazy: bool | None
) -> None:
    model = build(style, WITHOUT_REENTRY)
    text = refused(train, fs.init_mesh(), model, partial(by_functional_call, lazy=lazy))
    assert "RuntimeError: grad: backward differentiates a module's own parameter of shape" in text
    assert "functorch_shard.bind(model, params)(...)" in text


def _as_it_is(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    return fn(*args)


class Plain(nn.Module):
    """Without buffers or chance: it may be on the meta device."""

    def __init__(self, how: Callable[..., Any] = again) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(3))
        self.how: Any = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.how(lambda x: self.layers[1](self.layers[0](x).tanh()).tanh(), x)
        return self.layers[2](x)


@pytest.mark.parametrize("trained", ["all", "none", "last"])
def test_modules_that_run_with_their_own_parameters_are_accepted(trained: str) -> None:
    """Trainable, frozen, and the rest of a model of which a part is bound."""
    model, critic = Plain(_as_it_is), Plain().requires_grad_(trained == "all")
    critic.layers[2].requires_grad_(trained != "none")
    mesh = fs.init_mesh()
    params = fs.shard(model, fs.plan(model, mesh))
    rest = {"layers.0.weight": 2 * critic.get_parameter("layers.0.weight").detach()}

    def loss(how: Any, params: fs.Sharded) -> Tensor:
        critic.how = how
        x = bound(model, params, inputs())
        return (critic(x) + fs.bind(critic, rest)(x)).square().mean()

    expected, actual = (fs.grad(partial(loss, how))(params) for how in (_as_it_is, again))
    assert_trees_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("lazy", [None, True, False])
def test_a_checkpointed_function_of_the_parameters_is_accepted(lazy: bool | None) -> None:
    mesh, block = fs.init_mesh(), nn.Linear(6, 6).double()
    params = fs.shard(block, fs.plan(block, mesh))

    def passed(full: Any, x: Tensor) -> Tensor:
        return again(lambda p, x: functional_call(block, p, x), full, x)

    def closed_over(full: Any, x: Tensor) -> Tensor:
        return again(lambda x: functional_call(block, full, x), x)

    def bound_inside(full: Any, x: Tensor) -> Tensor:
        return again(lambda x: fs.bind(block, full)(x), x)

    def plain(full: Any, x: Tensor) -> Tensor:
        return functional_call(block, full, x)

    expected, *others = (
        fs.grad(lambda p, run=run: run(fs.gather(p, lazy=lazy), inputs()).tanh().square().sum())(params)
        for run in (plain, passed, closed_over, bound_inside)
    )
    for actual in others:
        assert_trees_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["passed", "closed over", "partial"])
def test_a_weight_that_a_checkpoint_is_given_is_accepted_under_functional_call(how: str) -> None:
    class Given(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight
            if how == "passed":
                return again(lambda x, weight: (x @ weight).tanh(), x, weight)
            if how == "partial":
                return again(partial(lambda weight, x: (x @ weight).tanh(), weight), x)
            return again(lambda x: (x @ weight).tanh(), x)

    mesh, model = fs.init_mesh(), Given(6, 6, bias=False).double()
    params = fs.shard({"weight": 2 * model.weight.detach()}, fs.plan(model, mesh))
    expected = fs.grad(lambda p: (inputs() @ fs.gather(p)["weight"]).tanh().square().sum())(params)
    for lazy in (None, True):
        actual = fs.grad(lambda p, lazy=lazy: by_functional_call(model, p, inputs(), lazy).square().sum())(params)
        assert_trees_close(actual, expected, rtol=0, atol=0)


Meta = Callable[[Callable[..., Tensor], dict[str, Tensor], Tensor], Tensor]


def _teacher_and_student(run: Callable[..., Tensor], p: dict[str, Tensor], x: Tensor) -> Tensor:
    ahead = {name: 0.9 * value + 0.01 for name, value in p.items()}
    return (run(p, x) * run(ahead, x)).sum() + run(p, x + 1).square().sum()


def _one_inner_step(run: Callable[..., Tensor], p: dict[str, Tensor], x: Tensor) -> Tensor:
    leaves = list(p.values())
    grads = torch.autograd.grad(run(p, x).square().mean(), leaves, create_graph=True)
    stepped = {name: value - 0.1 * grad for (name, value), grad in zip(p.items(), grads, strict=True)}
    return run(stepped, x + 1).square().mean()


@pytest.mark.parametrize("loss", [_teacher_and_student, _one_inner_step])
@pytest.mark.parametrize("order", ["once", "retained", "penalty", "in another thread"])
def test_each_copy_of_one_module_is_recomputed_with_its_own_parameters(loss: Meta, order: str) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        p = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
        value = loss(lambda p, x: fs.bind(model, p)(x), p, inputs())
        leaves, results = list(p.values()), []
        if order == "penalty":
            value = sum((g.square().sum() for g in torch.autograd.grad(value, leaves, create_graph=True)), value)
        thread = Thread(
            target=lambda: results.extend(torch.autograd.grad(value, leaves, retain_graph=order == "retained"))
        )
        thread.start() if "thread" in order else thread.run()
        if "thread" in order:
            thread.join()
        return [*results, *(torch.autograd.grad(value, leaves) if order == "retained" else ())]

    expected = gradients(Plain(_as_it_is))
    assert len(expected) == (12 if order == "retained" else 6)
    assert_trees_close(gradients(Plain()), expected, rtol=1e-12, atol=1e-12)
