"""Curvature of the awkward model on any ranks, and the matrices of the unsharded one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jacrev
from torch.func import hessian as hessian_of

import functorch_shard as fs
from functorch_shard.curvature import gauss_newton, hessian
from tests.laws import convention
from tests.laws.tasks import Data
from tests.support.models import awkward

MODEL = awkward()


def predicted(parameters: Any, x: Tensor) -> Tensor:
    return functional_call(MODEL, parameters, (x,))


def mismatch(predictions: Tensor, y: Tensor) -> Tensor:
    """Convex, and not quadratic."""
    return (predictions - y).cosh().log().mean()


def mismatches(params: fs.Sharded, batch: tuple[Tensor, Tensor]) -> Tensor:
    return each_mismatch(predicted(fs.gather(params), batch[0]), batch[1])


def each_mismatch(predictions: Tensor, y: Tensor) -> Tensor:
    return (predictions - y).cosh().log().mean(-1)


KINDS: dict[str, Callable[..., fs.curvature.Operator]] = {
    "hessian": hessian(lambda p, x, y: mismatch(predicted(fs.gather(p), x), y)),
    "gauss_newton": gauss_newton(lambda p, x: predicted(fs.gather(p), x), mismatch),
    "fisher": lambda p, *xy: gauss_newton(mismatches, lambda each: each.square().mean() / 2)(p, xy),
}


def operator(mesh: fs.Mesh, kind: str, **plan: Any) -> fs.curvature.Operator:
    params = fs.shard(MODEL, fs.plan(MODEL, mesh, **plan))
    batch = mesh.split(tuple(rows.flatten(0, 1) for rows in Data(mesh.size).samples()))
    return mesh.spmd(KINDS[kind])(params, *batch)


def small(mesh: fs.Mesh) -> fs.curvature.Operator:
    """The Hessian of a loss of few parameters."""
    params, _, samples = convention.on(mesh)
    return mesh.spmd(hessian(partial(convention.sharded_loss, lazy=None)))(params, samples.x, samples.y)


def matrix_of_small(num_ranks: int) -> Tensor:
    own, samples = convention.whole_parameters(), convention.Samples.of(num_ranks)

    def loss(flat: Tensor) -> Tensor:
        parts = zip(own.items(), flat.split([p.numel() for p in own.values()]), strict=True)
        full = {name: part.view(p.shape) for (name, p), part in parts}
        return convention.plain_loss(full, samples.x.flatten(0, 1), samples.y.flatten(0, 1))

    return hessian_of(loss)(torch.nn.utils.parameters_to_vector(own.values()))


def vector() -> Tensor:
    """The trainable parameters of the unsharded model, in its order."""
    return torch.nn.utils.parameters_to_vector([p for p in MODEL.parameters() if p.requires_grad]).detach()


def matrix(kind: str, num_ranks: int) -> Tensor:
    """Of the mean over ranks, from the unsharded model."""
    trainable, frozen = Data(num_ranks).parameters()

    def of_vector(flat: Tensor, x: Tensor) -> Tensor:
        parts = zip(trainable.items(), flat.split([p.numel() for p in trainable.values()]), strict=True)
        return predicted({name: part.view(p.shape) for (name, p), part in parts} | frozen, x)

    def of_rank(x: Tensor, y: Tensor) -> Tensor:
        if kind == "hessian":
            return hessian_of(lambda flat: mismatch(of_vector(flat, x), y))(vector())
        if kind == "fisher":
            rows = jacrev(lambda flat: each_mismatch(of_vector(flat, x), y))(vector())
            return rows.T @ rows / len(rows)
        jacobian = jacrev(lambda flat: of_vector(flat, x).flatten())(vector())
        curved = hessian_of(lambda out: mismatch(out.view(y.shape), y))(of_vector(vector(), x).flatten())
        return jacobian.T @ curved @ jacobian

    return torch.stack([of_rank(x, y) for x, y in zip(*Data(num_ranks).samples(), strict=True)]).mean(0)
