"""Everything one differentiates a sharded model for: what a rank computes, and what the unsharded model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, jvp, vjp, vmap

import functorch_shard as fs
from tests.laws.wrappers import WRAPPERS, Wrapper
from tests.support.models import awkward, draws, loss_of
from tests.support.reference import data_parallel_loss

Tree = Any


@dataclass(frozen=True)
class Data:
    """A model, its trainable parameters, a direction, and different samples for every rank."""

    num_ranks: int
    seed: int = 0

    def parameters(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        every = {name: p.detach() for name, p in awkward(self.seed).named_parameters()}
        trainable = [name for name, p in awkward(self.seed).named_parameters() if p.requires_grad]
        return {n: every[n] for n in trainable}, {n: x for n, x in every.items() if n not in trainable}

    def direction(self) -> dict[str, Tensor]:
        draw = draws(self.seed + 1)
        return {name: draw(x.shape) for name, x in self.parameters()[0].items()}

    def samples(self) -> tuple[Tensor, Tensor]:
        draw = draws(self.seed + 2)
        return draw(self.num_ranks, 4, 5), draw(self.num_ranks, 4, 3)


@dataclass(frozen=True)
class Sides:
    """A loss of one rank's samples, as a function of shards and of whole parameters."""

    model: nn.Module
    frozen: fs.Sharded
    mesh: fs.Mesh
    wrapper: Wrapper = WRAPPERS["plain"]
    gather: Callable[[Tree], Tree] = fs.gather  # without the options of the wrapper

    def of_full(self, full: Tree, x: Tensor, y: Tensor) -> Tensor:
        frozen: Any = fs.gather(self.frozen, **self.wrapper.gather)
        return self.wrapper.output(self.model, {**full, **frozen}, x, y)

    def of_shards(self, params: Tree, x: Tensor, y: Tensor) -> Tensor:
        def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            return self.wrapper.output(self.model, fs.gather(params, self.frozen, **self.wrapper.gather), x, y)

        return self.wrapper.loss(loss)(params, x, y)


def product(a: fs.Sharded, b: fs.Sharded) -> Tensor:
    """What a rank returns so that the mean (or the sum) over ranks of it is the scalar product of two trees."""
    return fs.curvature.vdot(a, b) / (1 if b.layout.reduction == "mean" else b.layout.num_ranks)


# What each rank computes, from its trainable shards p, a direction v of the same form, and its samples.
ON_RANK: dict[str, Callable[[Sides, Tree, Tree, Tensor, Tensor], Tree]] = {
    "grad through gather": lambda s, p, v, x, y: grad(s.of_shards)(p, x, y),
    "vjp through gather": lambda s, p, v, x, y: vjp(lambda p: s.of_shards(p, x, y), p)[1](y.new_ones(()))[0],
    "fs.grad": lambda s, p, v, x, y: fs.grad(s.of_shards)(p, x, y),
    "scatter_grads of full gradients": lambda s, p, v, x, y: fs.scatter_grads(grad(s.of_full)(s.gather(p), x, y)),
    "scatter_grads of fs.grad": lambda s, p, v, x, y: fs.scatter_grads(fs.grad(s.of_full)(s.gather(p), x, y)),
    "jvp": lambda s, p, v, x, y: jvp(lambda p: s.of_shards(p, x, y), (p,), (v,))[1],
    "value": lambda s, p, v, x, y: grad_and_value(s.of_shards)(p, x, y)[1],
    "forward over reverse": lambda s, p, v, x, y: jvp(lambda p: grad(s.of_shards)(p, x, y), (p,), (v,))[1],
    "forward over fs.grad": lambda s, p, v, x, y: jvp(lambda p: fs.grad(s.of_shards)(p, x, y), (p,), (v,))[1],
    "reverse over reverse": lambda s, p, v, x, y: grad(lambda p: product(grad(s.of_shards)(p, x, y), v))(p),
    "reverse over forward": lambda s, p, v, x, y: grad(lambda p: jvp(lambda p: s.of_shards(p, x, y), (p,), (v,))[1])(p),
    "forward over scatter_grads": lambda s, p, v, x, y: jvp(
        lambda p: fs.scatter_grads(grad(s.of_full)(s.gather(p), x, y)), (p,), (v,)
    )[1],
    "per-sample gradients, whole": lambda s, p, v, x, y: vmap(grad(s.of_full), (None, 0, 0))(s.gather(p), x, y),
    "per-sample gradients, sharded": lambda s, p, v, x, y: vmap(grad(s.of_shards), (None, 0, 0))(p, x, y),
    "ensemble": lambda s, p, v, x, y: vmap(s.of_shards, (0, None, None))(
        optree.tree_map(lambda a, b: torch.stack([a, a + b]), p, v), x, y
    ),
    "gradients of an ensemble": lambda s, p, v, x, y: vmap(grad(s.of_shards), (0, None, None))(
        optree.tree_map(lambda a, b: torch.stack([a, a + b]), p, v), x, y
    ),
    "gradient penalty": lambda s, p, v, x, y: grad(lambda p: grad(lambda x: s.of_shards(p, x, y))(x).square().sum())(p),
    "gradient of a mean over ranks": lambda s, p, v, x, y: grad(
        lambda p: fs.collectives.pmean(s.of_shards(p, x, y), s.mesh)
    )(p),
}
# Results that each rank has for itself; all others are shards of one value that all ranks share.
LOCAL = {"jvp", "value", "per-sample gradients, whole", "ensemble"}
# Of these it is the mean (or the sum) of what each rank computes, where parameters are whole.
OF_RANKS = {"per-sample gradients, sharded", "gradients of an ensemble", "gradient penalty"}


@cache
def expected(task: str, data: Data, reduction: str) -> Tree:
    """From the unsharded model: whole values, or for LOCAL tasks one row a rank."""
    p, frozen = data.parameters()
    v, (xs, ys) = data.direction(), data.samples()
    model = awkward(data.seed)

    def plain(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model, {**p, **frozen}, x, y)

    if task in LOCAL | OF_RANKS:
        side: Any = SimpleNamespace(of_shards=plain, of_full=plain, gather=lambda p: p)
        rows = [ON_RANK[task](side, p, v, x, y) for x, y in zip(xs, ys, strict=True)]
        stacked: Any = optree.tree_map(lambda *leaves: torch.stack(leaves), *rows)
        return stacked if task in LOCAL else optree.tree_map(lambda x: getattr(x, reduction)(0), stacked)

    def total(p: Any) -> Tensor:
        return data_parallel_loss(plain, reduction, p, xs, ys)

    # Where every rank returns the mean, the mean over ranks is itself, and the sum is that of the losses.
    if task == "gradient of a mean over ranks" or "over" not in task:
        return grad(total)(p)
    return jvp(grad(total), (p,), (v,))[1]


def programs(
    mesh: fs.Mesh, data: Data, wrapper: Wrapper, **options: Any
) -> tuple[Callable[[str], Callable[..., Tree]], tuple[Tree, ...]]:
    """The program of a task on ``mesh``, and the arguments of all."""
    model = awkward(data.seed).to(mesh.device)
    layout = fs.plan(model, mesh, **wrapper.plan, **options)
    params, frozen = fs.partition(wrapper.tree(fs.shard(model, layout)))
    v = fs.shard(data.direction(), params.layout)
    x, y = mesh.split(tuple(rows.flatten(0, 1).to(mesh.device) for rows in data.samples()))

    def on_rank(task: str, p: Tree, frozen: Tree, v: Tree, x: Tensor, y: Tensor) -> Tree:
        return ON_RANK[task](Sides(model, frozen, mesh, wrapper), p, v, x, y)

    return lambda task: mesh.spmd(partial(on_rank, task)), (params, frozen, v, x, y)


def on_mesh(
    mesh: fs.Mesh, data: Data, tasks: list[str], wrapper: Wrapper = WRAPPERS["plain"], **options: Any
) -> dict[str, Tree]:
    """Every task on ``mesh``: rows of all simulated ranks, or what this real rank has."""
    program, arguments = programs(mesh, data, wrapper, **options)
    return {task: wrapper.step(program(task))(*arguments) for task in tasks}


def whole(rows: fs.Sharded, num_replicas: int = 1) -> dict[str, Tensor]:
    """Shards of all ranks to whole values by plain indexing; replicas must agree bitwise."""
    result = {}
    for key, buffer in rows.layout.buffers.items():
        stack = rows[key].flatten(0, len(rows.layout.axes) - 1)  # (ranks, batch.., shard)
        copies = stack.unflatten(0, (num_replicas, -1))
        assert all(torch.equal(copy, copies[0]) for copy in copies)
        flat = torch.cat(copies[0].unbind(0), -1) if buffer.num_shards > 1 else copies[0][0]
        for slot in buffer.slots:
            result[slot.name] = flat[..., slot.offset : slot.end].unflatten(-1, slot.shape or (1,))
            result[slot.name] = result[slot.name] if slot.shape else result[slot.name].squeeze(-1)
    return result


def whole_of(rows: Any) -> dict[str, Tensor]:
    """Whole values from the shards of all ranks, in rank order."""
    axes = dict(rows.layout.axes)
    stacked = {key: x.unflatten(0, tuple(axes.values())) for key, x in rows.items()}
    if list(axes) == ["shard", "replicate"]:  # replicas first
        stacked = {key: x.transpose(0, 1) for key, x in stacked.items()}
    return whole(fs.Sharded(stacked, rows.layout), axes.get("replicate", 1))
