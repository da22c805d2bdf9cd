"""A step of AdamW of the benchmark's GPT, and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from tests.benchmarks.workloads import WORKLOADS


def gpt_of(depth: int) -> Any:
    """The GPT with fewer blocks."""
    torch.manual_seed(0)
    model: Any = WORKLOADS["gpt"].model()
    model.blocks = model.blocks[:depth]
    return model


def gpt_step(
    mesh: fs.Mesh,
    model: nn.Module,
    rank: int = 0,
    change: Callable[[fs.Sharded], fs.Sharded] = lambda grads: grads,
    units: Any = "auto",
) -> tuple[Any, list[Any]]:
    """Of a batch of one sample, that of data rank ``rank``; ``change`` is what becomes of the gradients."""
    work = WORKLOADS["gpt"]
    params = fs.shard(model, fs.plan(model, mesh, units=units))
    opt = fs.optimizer(torch.optim.AdamW, lr=1e-3)

    def loss(params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        return work.loss(functional_call(model, fs.gather(params), (x,)), y)

    def step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads, value = fs.grad_and_value(loss)(params, x, y)
        return *opt.step(params, grads=change(grads), state=state, donate=True), value

    return step, [params, opt.init(params), *(x.to(mesh.device) for x in work.batch(rank, 1))]
