"""torchopt: its optimizers on shards, gradients through its inner steps, and implicit differentiation."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from tests.referees.programs.curvature import MODEL, data, made
from tests.referees.referee import Referee, Where, of_all
from tests.referees.training import parts, tree_step, whole_of

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "adam": {"lr": 0.1},
    "adamw": {"lr": 0.1, "weight_decay": 0.1},
    "adamax": {"lr": 0.1},
    "radam": {"lr": 0.1},
    "rmsprop": {"lr": 0.1},
    "adagrad": {"lr": 0.1},
    "adadelta": {"lr": 0.1},
}


def batch() -> dict[str, Tensor]:
    return dict(zip("xy", data(), strict=True))


def loss_of(full: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(MODEL, full, (x,)), y)


def after_steps(optimizer: Any, number: int, params: Any, loss: Any, grad: Any) -> Any:
    state = optimizer.init(params)
    for _ in range(number):
        updates, state = optimizer.update(grad(loss)(params), state, params=params, inplace=False)
        params = import_module("torchopt").apply_updates(params, updates, inplace=False)
    return params


def optimized(where: Where, kind: str) -> dict[str, Any]:
    trained = partial(after_steps, getattr(import_module("torchopt"), kind)(**OPTIMIZERS[kind]), 3)
    return {"parameters": whole_of(where, made(), batch(), loss_of, trained)}


def own() -> dict[str, Tensor]:
    return {name: p.detach() for name, p in made().named_parameters()}


class Adapted(nn.Module):
    """A model after inner steps by ``MetaSGD``, which changes the module while it runs; its loss on other data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = made()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        optimizer = import_module("torchopt").MetaSGD(self.net, lr=0.3)
        for _ in range(2):
            optimizer.step(F.cross_entropy(self.net(x[::2]), y[::2]))
        return F.cross_entropy(self.net(x[1::2]), y[1::2])


def meta(where: Where) -> dict[str, Any]:
    """The gradient by the parameters before inner steps of each rank on its own."""
    model = Adapted()
    # a copy: functional_call puts the parameters that the module has in the end into the dict
    return {"gradients": whole_of(where, model, batch(), lambda p, x, y: functional_call(model, dict(p), (x, y)))}


def maml(where: Where) -> dict[str, Any]:
    """The gradient through two functional steps of the library, on shards."""
    inner = import_module("torchopt").sgd(lr=0.3)
    gradient = lambda p, loss, grad: grad(lambda p: loss(after_steps(inner, 2, p, loss, grad)))(p)  # noqa: E731
    return {"gradients": whole_of(where, made(), batch(), loss_of, gradient)}


def implicit(where: Where) -> dict[str, Any]:
    """The derivative of a solution's loss by the weight of a penalty: by ``custom_root``; on shards by its solver."""
    if isinstance(where, int):
        batches = [(part["x"], part["y"]) for part in parts(batch(), where)]
        return of_all({"derivative": _derivative(own(), batches)})
    weight, params = 0.05, fs.shard(made(), fs.plan(made(), where))

    def penalized(p: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        full = fs.gather(p)
        return loss_of(full, x, y) + weight * torch.stack([p.square().sum() for p in full.values()]).sum()

    data_of_ranks = where.split(data())
    for _ in range(20):
        params = tree_step(params, where.spmd(fs.grad(penalized))(params, *data_of_ranks), 0.3)
    outer = where.spmd(fs.grad(lambda p, x, y: loss_of(fs.gather(p), x.flip(0), y)))(params, *data_of_ranks)
    curvature = where.spmd(fs.curvature.hessian(penalized))(params, *data_of_ranks)
    cg = import_module("torchopt").linalg.cg
    solution = cg(curvature.matvec, fs.curvature.to_vector(outer), rtol=1e-10, maxiter=200)
    return of_all({"derivative": -2 * fs.curvature.to_vector(params) @ solution})


def _derivative(start: dict[str, Tensor], batches: Any) -> Tensor:
    library = import_module("torchopt")

    def penalized(values: Any, weight: Tensor) -> Tensor:
        full = dict(zip(start, values, strict=True))
        penalty = torch.stack([p.square().sum() for p in values]).sum()
        return torch.stack([loss_of(full, x, y) for x, y in batches]).mean() + weight * penalty

    stationary = torch.func.grad(penalized)

    @library.diff.implicit.custom_root(
        stationary, argnums=1, solve=library.linear_solve.solve_normal_cg(maxiter=200, rtol=1e-12)
    )
    def solve(params: Any, weight: Tensor) -> Any:
        for _ in range(20):
            grads = stationary(params, weight)
            params = tuple(p - 0.3 * g for p, g in zip(params, grads, strict=True))
        return params

    weight = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    solution = dict(zip(start, solve(tuple(start.values()), weight), strict=True))
    outer = torch.stack([loss_of(solution, x.flip(0), y) for x, y in batches]).mean()
    return torch.autograd.grad(outer, weight)[0]


REFEREES = [
    *(Referee("torchopt", kind, partial(optimized, kind=kind), tolerance=1e-8) for kind in OPTIMIZERS),
    Referee("torchopt", "a gradient through steps of sgd (MAML)", maml),
    Referee("torchopt", "a gradient through MetaSGD", meta),
    Referee("torchopt", "implicit differentiation, cg on flat vectors", implicit, tolerance=1e-6),
]
