"""Gradients by ``backward()``; and derivatives of an awkward model, as functions of its parameters and data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.func import functional_call, jvp

import functorch_shard as fs
from tests.support.models import awkward

tree_map: Any = optree.tree_map


def by_backward(loss: Callable[..., Tensor]) -> Callable[..., fs.Sharded]:
    """``backward()`` as a function of parameters."""

    def gradient(params: fs.Sharded, *args: Any) -> fs.Sharded:
        leaves = fs.Sharded({key: x.detach().requires_grad_() for key, x in params.items()}, params.layout)
        loss(leaves, *args).backward()
        return fs.Sharded({key: x.grad for key, x in leaves.items()}, params.layout)

    return gradient


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

    def hvp(self, params: fs.Sharded, x: Tensor) -> Any:
        trainable, frozen = fs.partition(params)
        tangent = tree_map(torch.cos, trainable)
        return jvp(fs.grad(lambda p: self.loss(fs.merge(p, frozen), x)), (trainable,), (tangent,))

    def clipped(self, params: fs.Sharded, x: Tensor) -> Any:
        return fs.clip_by_global_norm(fs.grad(self.loss)(params, x), 0.1)
