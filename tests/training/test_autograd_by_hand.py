"""Programs that call ``requires_grad_`` and ``autograd.grad`` themselves, under ``fs.grad``: forces, PINNs, MAML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call, jvp

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close

Call = Callable[[Any, Tensor], Tensor]


def forces(call: Call, params: Any, x: Tensor) -> Tensor:
    return forces_of_the_batch_itself(call, params, x.detach())


def forces_of_the_batch_itself(call: Call, params: Any, x: Tensor) -> Tensor:
    energy = call(params, x.requires_grad_())
    return energy.square().mean() + grad(energy.sum(), x, create_graph=True)[0].square().mean()


def equation(call: Call, params: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    u = call(params, x)
    (du,) = grad(u, x, torch.ones_like(u), create_graph=True)
    (d2u,) = grad(du[:, 0].sum(), x, create_graph=True)
    return (d2u[:, 0] + u[:, 0]).square().mean()


def inner_step(call: Call, params: Any, x: Tensor) -> Tensor:
    grads = grad(call(params, x).square().mean(), list(params.values()), create_graph=True)
    new = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
    return call(new, x).square().mean()


AXES: list[dict[str, int]] = [{"shard": 2}, {"replicate": 2, "shard": 2}]
MESHES = [fs.simulated_mesh(axes, kind=kind) for axes in AXES for kind in ("batched", "sequential")]


@pytest.mark.parametrize("mesh", [*MESHES, fs.init_mesh()], ids=str)
@pytest.mark.parametrize("task", [forces, forces_of_the_batch_itself, equation, inner_step])
def test_gradients_and_products_with_the_hessian_are_those_of_the_unsharded_program(task: Any, mesh: fs.Mesh) -> None:
    """Also where the batch requires grad before the step."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double(), torch.randn(8, 3).double()
    layout = fs.plan(model, mesh)
    params, v = fs.shard(model, layout), fs.shard({n: torch.randn_like(p) for n, p in model.named_parameters()}, layout)

    def call(params: Any, x: Tensor) -> Tensor:
        return functional_call(model, params, (x,))

    gradient = fs.grad(lambda params, x: task(call, fs.gather(params), x))
    grads = mesh.spmd(gradient)(params, mesh.split(x.clone()))
    of_leaf = mesh.spmd(gradient)(params, mesh.split(x.clone().requires_grad_()))
    hessian = mesh.spmd(lambda p, v, x: jvp(lambda p: gradient(p, x), (p,), (v,))[1])
    product = hessian(params, v, mesh.split(x.clone()))

    full = {name: p.requires_grad_() for name, p in model.named_parameters()}
    loss = sum(task(call, full, rows) for rows in x.chunk(mesh.size)) / mesh.size
    expected = grad(torch.as_tensor(loss), list(full.values()), create_graph=True)
    along = grad(expected, list(full.values()), list(fs.gather(v, lazy=False).values()))
    for got, want in ((grads, expected), (of_leaf, expected), (product, along)):
        assert_trees_close(fs.gather(got), dict(zip(full, want, strict=True)), rtol=1e-12, atol=1e-14)
