"""Functions of the parameters of an awkward model that differentiate it in every way."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor
from torch.func import functional_call, jvp, vjp, vmap

import functorch_shard as fs
from tests.support.models import awkward

tree_map: Any = optree.tree_map


def data(mesh: fs.Mesh, seed: int, rows: int = 3) -> Tensor:
    return mesh.split(torch.randn(mesh.size * rows, 5, generator=torch.Generator().manual_seed(seed)).double())


class Program:
    """The awkward model on a mesh, and functions of its parameters."""

    def __init__(self, mesh: fs.Mesh, **plan: Any) -> None:
        self.model, self.mesh = awkward(), mesh
        self.params = fs.shard(self.model, fs.plan(self.model, mesh, **plan))

    def loss(self, params: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(self.model, fs.gather(params), (x,)).square().mean()

    def grad(self, params: fs.Sharded, x: Tensor) -> Any:
        return fs.grad_and_value(self.loss)(params, x)

    def func_grad(self, params: fs.Sharded, x: Tensor) -> Any:
        trainable, frozen = fs.partition(params)
        return torch.func.grad(lambda p: self.loss(fs.merge(p, frozen), x))(trainable)

    def jvp(self, params: fs.Sharded, x: Tensor) -> Any:
        trainable, frozen = fs.partition(params)
        tangent = tree_map(torch.sin, trainable)
        return jvp(lambda p: self.loss(fs.merge(p, frozen), x), (trainable,), (tangent,))

    def vjp(self, params: fs.Sharded, x: Tensor) -> Any:
        trainable, frozen = fs.partition(params)
        value, pull, *_ = vjp(lambda p: self.loss(fs.merge(p, frozen), x), trainable)
        return value, pull(torch.ones_like(value))

    def hvp(self, params: fs.Sharded, x: Tensor) -> Any:
        trainable, frozen = fs.partition(params)
        tangent = tree_map(torch.cos, trainable)
        return jvp(fs.grad(lambda p: self.loss(fs.merge(p, frozen), x)), (trainable,), (tangent,))

    def per_sample(self, params: fs.Sharded, x: Tensor) -> Any:
        trainable, frozen = fs.partition(params)
        one = torch.func.grad(lambda p, row: self.loss(fs.merge(p, frozen), row[None]))
        return vmap(one, in_dims=(None, 0))(trainable, x)

    def clipped(self, params: fs.Sharded, x: Tensor) -> Any:
        return fs.clip_by_global_norm(fs.grad(self.loss)(params, x), 0.1)


PROGRAMS = ["grad", "func_grad", "jvp", "vjp", "hvp", "per_sample", "clipped"]
