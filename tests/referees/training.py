"""Train any model: by torch alone, and the same steps on ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

import functorch_shard as fs
from tests.referees.referee import Where

Batch = Mapping[str, Any]
STEPS, RATE, MOMENTUM = 3, 0.05, 0.9


@dataclass(frozen=True)
class Task:
    """A model, a global batch of four rows or a multiple, and a loss of what the model returns.

    Each part is a function of a module, so that a task can be sent to other processes.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any], Tensor]
    checkpointing: str = ""  # the model's method that turns it on
    dtype: torch.dtype = torch.float64
    randomness: str = "different"  # of batched ranks, which draw from one generator

    def made(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.model().to(self.dtype).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # ranks draw other numbers than one process does
        if self.checkpointing:
            getattr(model, self.checkpointing)()
        return model

    def on_ranks(self, model: nn.Module, params: fs.Sharded, batch: Batch) -> Tensor:
        """The loss of one rank."""
        if self.checkpointing:
            return self.loss(fs.bind(model, params)(**batch))
        return self.loss(functional_call(model, fs.gather(params), (), dict(batch)))


def parts(batch: Batch, num_ranks: int) -> list[Batch]:
    """What each rank gets of a global batch."""
    cut = {name: x.chunk(num_ranks) for name, x in batch.items()}
    return [{name: rows[rank] for name, rows in cut.items()} for rank in range(num_ranks)]


def trained(task: Task, where: Where) -> dict[str, Any]:
    """Losses and parameters of a few steps, and the gradient of the first."""
    return _unsharded(task, where) if isinstance(where, int) else _on_ranks(task, where)


def _unsharded(task: Task, num_ranks: int) -> dict[str, Any]:
    model, batches, losses, gradients = task.made(), parts(task.batch(), num_ranks), [], {}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([task.loss(model(**part)) for part in batches]).mean()
        loss.backward()
        gradients = gradients or {name: _gradient(p) for name, p in model.named_parameters() if p.requires_grad}
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "gradients": gradients, "parameters": dict(model.named_parameters())}


def _gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad.clone()


def _on_ranks(task: Task, mesh: fs.Mesh) -> dict[str, Any]:
    model, losses, gradients = task.made(), [], None
    params = fs.shard(model, fs.plan(model, mesh))
    optimizer = fs.optimizer(torch.optim.SGD, lr=RATE, momentum=MOMENTUM)
    trainable, frozen = fs.partition(params)
    state = optimizer.init(trainable)

    @mesh.spmd(randomness=task.randomness)
    def step(trainable: fs.Sharded, frozen: fs.Sharded, state: Any, batch: Batch) -> Any:
        loss = lambda p: task.on_ranks(model, fs.merge(p, frozen), batch)  # noqa: E731
        grads, value = fs.grad_and_value(loss)(trainable)
        new, state = optimizer.step(trainable, grads=grads, state=state)
        return new, state, grads, fs.collectives.pmean(value, mesh)

    batch = mesh.split(dict(task.batch()))
    for _ in range(STEPS):
        trainable, state, grads, loss = step(trainable, frozen, state, batch)
        gradients = gradients or fs.gather(grads, lazy=False)
        losses.append(loss)
    return {"losses": losses, "gradients": gradients, "parameters": fs.gather(trainable, frozen, lazy=False)}


def hessian_product(task: Task, where: Where) -> dict[str, Any]:
    """The product of the loss's Hessian with the parameters, forward over reverse."""
    model = task.made()
    if isinstance(where, int):
        batches, own = parts(task.batch(), where), {name: p.detach() for name, p in model.named_parameters()}

        def loss(p: Any) -> Tensor:
            return torch.stack([task.loss(functional_call(model, p, (), dict(part))) for part in batches]).mean()

        return {"product": jvp(torch.func.grad(loss), (own,), (own,))[1]}
    params = fs.shard(model, fs.plan(model, where))

    @where.spmd
    def product(params: fs.Sharded, batch: Batch) -> Any:
        return jvp(fs.grad(lambda p: task.on_ranks(model, p, batch)), (params,), (params,))[1]

    return {"product": fs.gather(product(params, where.split(dict(task.batch()))), lazy=False)}


def tree_step(params: Any, grads: Any, rate: float = RATE) -> Any:
    """One step of gradient descent on any tree."""
    return optree.tree_map(lambda p, g: p - rate * g, params, grads)
