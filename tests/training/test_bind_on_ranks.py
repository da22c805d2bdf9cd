"""bind on gloo ranks: a model that checkpoints itself trains as one that does not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    """Three layers between an embedding and a head that is tied to it; each is checkpointed."""

    def __init__(self, how: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        self.blocks = nn.Sequential(*(Layer(how) for _ in range(3)))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[:2](self.embed(x)), scale=1.0))


again = partial(checkpoint, use_reentrant=False)


def inputs(num_rows: int = 8) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(mesh: fs.Mesh, model: nn.Module, run: Callable[[fs.Full, Tensor], Tensor], lazy: bool | None = None) -> Any:
    """SGD: losses, parameters, and the collectives of each step."""
    layout = fs.plan(model, mesh)
    params, losses, kinds = fs.shard(model, layout), [], []
    loss_of = lambda p, x: run(fs.gather(p, lazy=lazy), x).square().mean()  # noqa: E731
    for step in range(4):
        torch.manual_seed(step)
        with count_collectives() as seen:
            grads, loss = fs.grad_and_value(loss_of)(params, mesh.split(inputs()))
        kinds.append(dict(seen.by_kind))
        params = fs.Sharded({key: params[key] - 0.3 * grads[key] for key in params}, layout)
        losses.append(fs.collectives.pmean(loss, mesh).item())
    return losses, dict(fs.gather(params, lazy=False)), kinds


@pytest.mark.parametrize("trained", ["all", "none", "last"])
def test_modules_that_run_with_their_own_parameters_are_accepted(trained: str) -> None:
    """Trainable, frozen, and the rest of a model of which a part is bound."""
    model = Model().eval()
    params = fs.shard(model, fs.plan(model, fs.init_mesh()))
    rest = {"embed.weight": 2 * model.embed.weight.detach()}

    def loss(how: Any, params: fs.Sharded) -> Tensor:
        critic = Model(how).eval().requires_grad_(trained == "all")
        critic.blocks[2].requires_grad_(trained != "none")
        x = fs.bind(model, params)(inputs())
        return (critic(x) + fs.bind(critic, rest)(x)).square().mean()

    expected, actual = (fs.grad(partial(loss, how))(params) for how in (None, again))
    assert_trees_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("lazy", [True, False])
def test_a_checkpointed_function_of_the_parameters_is_accepted(lazy: bool) -> None:
    mesh, block = fs.init_mesh(), nn.Linear(6, 6).double()
    params = fs.shard(block, fs.plan(block, mesh))

    ways: list[Callable[[fs.Full, Tensor], Tensor]] = [
        lambda full, x: functional_call(block, full, x),
        lambda full, x: again(lambda p, x: functional_call(block, p, x), full, x),
        lambda full, x: again(lambda x: functional_call(block, full, x), x),
        lambda full, x: again(lambda x: fs.bind(block, full)(x), x),
    ]
    expected, *others = (
        fs.grad(lambda p, way=way: way(fs.gather(p, lazy=lazy), inputs()).tanh().square().sum())(params) for way in ways
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
def test_each_copy_of_one_module_is_recomputed_with_its_own_parameters_in_any_thread(loss: Meta) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        p = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
        value, leaves = loss(lambda p, x: fs.bind(model, p)(x), p, inputs()), list(p.values())
        penalty = sum((g.square().sum() for g in torch.autograd.grad(value, leaves, create_graph=True)), value)
        with ThreadPoolExecutor(1) as thread:
            return [*thread.submit(torch.autograd.grad, penalty, leaves).result()]

    assert_trees_close(gradients(Model(again).eval()), gradients(Model().eval()), rtol=1e-12, atol=1e-12)


def train_on_this_rank() -> Any:
    mesh, model = fs.init_mesh(), Model(again)
    own = lambda: [(id(x), x._version) for x in (*model.parameters(), *model.buffers())]  # noqa: E731
    before = own()
    others = [train(mesh, model, lambda full, x: fs.bind(model, full)(x), lazy) for lazy in (None, False)]
    assert own() == before
    plain = Model()
    return train(mesh, plain, lambda full, x: functional_call(plain, full, x)), others


def test_steps_are_bitwise_those_without_checkpointing_and_gather_what_they_must() -> None:
    for (losses, params, kinds), others in run_ranks(train_on_this_rank, 2):
        assert losses[-1] < losses[0]
        assert kinds == [{"all_gather": 8, "psum_scatter": 5}] * 4
        for actual in others:
            assert actual[0] == losses
            assert_trees_close(actual[1], params, rtol=0, atol=0)
        assert others[0][2] == kinds  # a region of one unit gathers nothing more
