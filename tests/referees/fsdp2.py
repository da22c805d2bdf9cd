"""The same programs under FSDP2, on the ranks of a mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import functorch_shard as fs
from tests.referees.training import MOMENTUM, RATE, STEPS, Task


def whole(x: Tensor) -> Tensor:
    """A parameter of FSDP2 on every rank."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def fully_sharded(model: nn.Module) -> nn.Module:
    """The model with one unit for each layer that has parameters, and one around them."""
    for module in model.modules():
        if module is not model and any(True for _ in module.parameters(recurse=False)):
            fully_shard(module)
    fully_shard(model)
    return model


def trained_by_fsdp2(task: Task, mesh: fs.Mesh) -> dict[str, Any]:
    """What :func:`trained` returns."""
    model, losses, gradients = fully_sharded(task.made()), [], {}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    batch = mesh.split(dict(task.batch()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = task.loss(model(**batch))
        loss.backward()
        named = model.named_parameters()
        gradients = gradients or {name: torch.zeros(()) if p.grad is None else whole(p.grad) for name, p in named}
        optimizer.step()
        losses.append(fs.collectives.pmean(loss.detach(), mesh))
    parameters = {name: whole(p).detach() for name, p in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "parameters": parameters}
