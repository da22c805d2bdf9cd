"""A step of AdamW on simulated ranks, as a user writes it: gather, gradient, reduction, update, the mean loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

Loss = Callable[[Tensor, Tensor], Tensor]


def adamw_step(mesh: fs.Mesh, model: nn.Module, loss: Loss) -> tuple[Callable[..., Any], list[Any]]:
    """``step(params, state, x, y)``, which returns new parameters, state and the loss; and its first arguments."""
    params, opt = fs.shard(model, fs.plan(model, mesh)), fs.optimizer(torch.optim.AdamW, lr=1e-3)

    def loss_of(params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(model, fs.gather(params), (x,)), y)

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads, value = fs.grad_and_value(loss_of)(params, x, y)
        return *opt.step(params, grads=grads, state=state), fs.collectives.pmean(value, mesh)

    return step, [params, opt.init(params)]
