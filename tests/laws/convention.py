"""What is differentiated through gradients: training steps, penalties, Hessian products, by any inner gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from tests.support.models import draws
from tests.support.reference import data_parallel_loss, dot

Tree = Any
tree_map: Any = optree.tree_map  # its type knows no trees of other libraries
LR, WEIGHT = 0.3, 0.7
SIZES = (3, 5, 2)  # of a batch, the inputs and the outputs


@cache
def model() -> nn.Module:
    """Buffers of 33 and 16 elements with padding: parameters that 2, 3 and 4 ranks cut in a row."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def whole_parameters() -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model().named_parameters()}


def direction() -> dict[str, Tensor]:
    draw = draws(1)
    return {name: draw(p.shape) for name, p in whole_parameters().items()}


@dataclass(frozen=True)
class Samples:
    """Two batches, different ones on every rank."""

    x: Tensor
    y: Tensor
    next_x: Tensor
    next_y: Tensor

    @staticmethod
    def of(num_ranks: int) -> Samples:
        draw, (rows, wide, narrow) = draws(2), SIZES
        return Samples(*(draw(num_ranks, rows, n) for n in (wide, narrow, wide, narrow)))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.y, self.next_x, self.next_y


def on(mesh: fs.Mesh, **plan: Any) -> tuple[fs.Sharded, fs.Sharded, Samples]:
    """Parameters, a direction, and the samples of this rank, or on simulated ones those of all."""
    layout = fs.plan(whole_parameters(), mesh, **plan)
    rows = mesh.split(tuple(x.flatten(0, 1) for x in Samples.of(mesh.size).tensors()))
    return fs.shard(whole_parameters(), layout), fs.shard(direction(), layout), Samples(*rows)


def plain_loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return ((functional_call(model(), p, (x,)) - y) ** 2).mean()


def sharded_loss(p: Any, x: Tensor, y: Tensor, lazy: bool | None) -> Tensor:
    return plain_loss(fs.gather(p, lazy=lazy), x, y)


def by_scatter_grads(loss: Any, lazy: bool | None) -> Callable[..., Tree]:
    """The gradient of :func:`sharded_loss` by hand, which knows that loss alone."""
    return lambda p, x, y: fs.scatter_grads(torch.func.grad(plain_loss)(fs.gather(p, lazy=lazy), x, y))


def autograd_grad(loss: Any) -> Callable[..., Tree]:
    def gradient(p: Tree, *args: Tensor) -> Tree:
        keys = list(p)
        grads = torch.autograd.grad(loss(p, *args), [p[key] for key in keys], create_graph=True)
        return fs.Sharded(zip(keys, grads, strict=True), p.layout)

    return gradient


INNER: dict[str, Callable[[Any, bool | None], Callable[..., Tree]]] = {
    "fs.grad": lambda loss, lazy: fs.grad(loss),
    "torch.func.grad": lambda loss, lazy: torch.func.grad(loss),
    "scatter_grads by hand": by_scatter_grads,
}


@dataclass(frozen=True)
class Side:
    """A loss of parameters, its gradient, and what one does with trees of them: by default of whole values."""

    loss: Callable[..., Tensor]
    gradient: Callable[..., Tree]
    outer: Callable[[Callable[[Tree], Tensor]], Callable[[Tree], Tree]] = torch.func.grad
    dot: Callable[[Tree, Tree], Tensor] = dot
    norm: Callable[[Tree], Tensor] = lambda a: dot(a, a).sqrt()

    def step(self, p: Tree, s: Samples) -> Tree:
        return tree_map(lambda w, g: w - LR * g, p, self.gradient(p, s.x, s.y))


def penalty_on_inputs(loss: Callable[..., Tensor], p: Tree, s: Samples) -> Tensor:
    return torch.func.grad(lambda x: loss(p, x, s.y))(s.x).square().sum()


# What is differentiated by p at the end, and what is so from the start.
TASKS: dict[str, Callable[[Side, Tree, Tree, Samples], Tree]] = {
    "reverse over reverse": lambda a, p, v, s: a.outer(lambda p: a.dot(a.gradient(p, s.x, s.y), v))(p),
    "through one step": lambda a, p, v, s: a.outer(lambda p: a.loss(a.step(p, s), s.next_x, s.next_y))(p),
    "through three steps": lambda a, p, v, s: a.outer(
        lambda p: a.loss(a.step(a.step(a.step(p, s), s), s), s.next_x, s.next_y)
    )(p),
    "penalty on the gradient by inputs": lambda a, p, v, s: a.outer(lambda p: penalty_on_inputs(a.loss, p, s))(p),
    "penalty on the norm of the gradient": lambda a, p, v, s: a.outer(
        lambda p: a.loss(p, s.x, s.y) + WEIGHT * a.norm(a.gradient(p, s.x, s.y))
    )(p),
    "penalty on the norm of parameters": lambda a, p, v, s: a.outer(lambda p: a.loss(p, s.x, s.y) + WEIGHT * a.norm(p))(
        p
    ),
}


def of_shards(loss: Any, gradient: Any, outer: Any = fs.grad) -> Side:
    return Side(loss, gradient, outer, fs.curvature.vdot, fs.global_norm)


def sharded_side(inner: str, lazy: bool | None, outer: Any = fs.grad) -> Side:
    loss = partial(sharded_loss, lazy=lazy)
    return of_shards(loss, INNER[inner](loss, lazy), outer)


def on_mesh(mesh: fs.Mesh, side: Side, tasks: list[str]) -> dict[str, fs.Full]:
    """Every task's result, whole."""
    params, v, samples = on(mesh)
    results = {}
    for task in tasks:
        run = mesh.spmd(lambda p, v, *rows, task=task: TASKS[task](side, p, v, Samples(*rows)))
        results[task] = fs.gather(tree_map(Tensor.detach, run(params, v, *samples.tensors())), lazy=False)
    return results


def expected(num_ranks: int, tasks: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """The same of the unsharded model, whose loss is the mean over ranks."""
    return {task: _expected(num_ranks, task) for task in tasks}


@cache
def _expected(num_ranks: int, task: str) -> dict[str, Tensor]:
    samples, loss = Samples.of(num_ranks), partial(data_parallel_loss, plain_loss, "mean")
    if task != "penalty on the gradient by inputs":
        return TASKS[task](Side(loss, torch.func.grad(loss)), whole_parameters(), direction(), samples)

    def penalty(p: Any, *row: Tensor) -> Tensor:  # of a rank's own loss by its own inputs
        return penalty_on_inputs(plain_loss, p, Samples(*row))

    return torch.func.grad(partial(data_parallel_loss, penalty, "mean"))(whole_parameters(), *samples.tensors())
