"""bind on gloo ranks: a model that checkpoints itself trains as one that does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.pool import run_ranks

WIDTH = 6
Run = Callable[[nn.Module, fs.Sharded, Tensor], Tensor]


class Layer(nn.Module):
    """A direct use of a parameter, a submodule's, statistics, and a mask that has to be drawn alike twice.

    As transformers' ``GradientCheckpointingLayer``: the call itself is checkpointed, keywords go in beforehand.
    """

    def __init__(self, how: Callable[..., Any] | None) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.gate, self.how = nn.Parameter(torch.tensor(0.7)), how

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.how is None:
            return super().__call__(*args, **kwargs)
        return self.how(partial(super().__call__, **kwargs), *args)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.gate * nn.functional.dropout(self.norm(self.fc(x)).tanh(), 0.2)


class Model(nn.Module):
    """Three layers between an embedding and a head that is tied to it; each is checkpointed, or regions of regions."""

    def __init__(self, how: Callable[..., Any] | None = None, nested: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        self.blocks = nn.Sequential(*(Layer(None if nested else how) for _ in range(3)))
        self.how = how if nested else None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.outer(self.embed(x)) if self.how is None else self.how(self.outer, self.embed(x)))

    def outer(self, x: Tensor) -> Tensor:
        if self.how is None:
            return self.blocks[2](self.inner(x), scale=1.0)
        return self.how(self.blocks[2], self.how(self.inner, x))

    def inner(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


again = partial(checkpoint, use_reentrant=False)


def inputs(num_rows: int = 8) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_functional_call(model: nn.Module, params: fs.Sharded, x: Tensor) -> Tensor:
    return functional_call(model, fs.gather(params), (x,))


def bound(model: nn.Module, params: Any, x: Tensor) -> Tensor:
    return fs.bind(model, params)(x)


def train(mesh: fs.Mesh, model: nn.Module, run: Run, steps: int = 4, rate: float = 0.3) -> Any:
    """SGD: losses, parameters, and the collectives of each step."""
    layout = fs.plan(model, mesh)
    params, losses, kinds = fs.shard(model, layout), [], []
    for step in range(steps):
        torch.manual_seed(step)
        with count_collectives() as seen:
            grads, loss = fs.grad_and_value(lambda p, x: run(model, p, x).square().mean())(params, mesh.split(inputs()))
        kinds.append(dict(seen.by_kind))
        params = fs.Sharded({key: params[key] - rate * grads[key] for key in params}, layout)
        losses.append(fs.collectives.pmean(loss, mesh).item())
    return losses, dict(fs.gather(params, lazy=False)), kinds


def own_state(model: nn.Module) -> list[tuple[str, int, int]]:
    """Which tensors the model has, and how often they were written to."""
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, id(x), x._version) for name, x in held]


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


def train_on_this_rank() -> Any:
    mesh, others = fs.init_mesh(), []
    for nested, lazy in product((False, True), (None, False)):
        model = Model(again, nested)
        before = own_state(model)
        run = lambda model, params, x, lazy=lazy: bound(model, fs.gather(params, lazy=lazy), x)  # noqa: E731
        others.append(train(mesh, model, run))
        assert own_state(model) == before
    return train(mesh, Model(), by_functional_call), others


def test_steps_are_bitwise_those_without_checkpointing_and_gather_what_they_must() -> None:
    for (losses, params, kinds), others in run_ranks(train_on_this_rank, 2):
        assert losses[-1] < losses[0]
        assert kinds == [{"all_gather": 8, "psum_scatter": 5}] * 4
        for actual in others:
            assert actual[0] == losses
            assert_trees_close(actual[1], params, rtol=0, atol=0)
        layers, _, nested, _ = others
        assert layers[2] == kinds
        # a region of several units runs through all of them before it goes back; of one it gathers nothing more
        assert nested[2] == [{"all_gather": 8 + 5, "psum_scatter": 5}] * 4
