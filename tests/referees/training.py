"""A program by its parts, a model, a batch and a loss: run by torch alone, on ranks, and under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, jvp

import functorch_shard as fs
from tests.referees.referee import Where
from tests.support.tensor_parallel import whole

Batch = Mapping[str, Any]
STEPS, RATE, MOMENTUM = 3, 0.05, 0.9


def itself(x: Tensor) -> Tensor:
    return x


class Calling(nn.Module):
    """A model whose forward is ``call(model, *args)``: it has the parameters of the call, and FSDP2 gathers them."""

    def __init__(self, model: nn.Module, call: Any) -> None:
        super().__init__()
        self.model, self._call = model, call

    def forward(self, *args: Any, **batch: Tensor) -> Any:
        return self._call(self.model, *args, **batch)


@dataclass(frozen=True)
class Task:
    """A model, a global batch of four rows or a multiple, and a loss of what the model returns.

    Each part is a function of a module, so that a task can be sent to other processes.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any], Tensor] = itself
    checkpointing: str = ""  # the model's method that turns it on
    dtype: torch.dtype = torch.float64
    dropout: bool = False
    bound: bool = False  # by fs.bind, and not called by functional_call
    lazy: bool | None = None
    randomness: str = "different"  # of batched ranks, which draw from one generator

    def made(self) -> nn.Module:
        torch.manual_seed(0)
        model = (
            self.model().double() if self.dtype is torch.float64 else self.model().to(self.dtype)
        ).train()  # complex too
        for module in model.modules():
            for name in () if self.dropout else ("p", "drop_prob", "dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)  # ranks draw other numbers than one process does
        if self.checkpointing:
            getattr(model, self.checkpointing)()
        return model

    def on_ranks(self, model: nn.Module, params: fs.Sharded, batch: Batch) -> Tensor:
        """The loss of one rank."""
        if self.checkpointing or self.bound:
            return self.loss(fs.bind(model, params)(**batch))
        return self.loss(functional_call(model, fs.gather(params, lazy=self.lazy), (), dict(batch)))


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
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = gradients or {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named.items()
        }
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "gradients": gradients, "parameters": dict(model.named_parameters())}


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


def rows_of(where: Where, model: nn.Module, batch: Batch, of_rank: Callable[..., Any]) -> Any:
    """What each rank returns of whole parameters and its part of a batch."""
    if isinstance(where, int):
        own = {name: p.detach() for name, p in model.named_parameters()}
        rows = [of_rank(own, **part) for part in parts(batch, where)]
        return optree.tree_map(lambda *xs: torch.stack(xs), *rows)
    params = fs.shard(model, fs.plan(model, where))
    return where.spmd(lambda p, batch: of_rank(fs.gather(p), **batch))(params, where.split(dict(batch)))


def whole_of(
    where: Where, model: nn.Module, batch: Batch, loss: Callable[..., Tensor], program: Callable[..., Any] | None = None
) -> Any:
    """A tree like the parameters: what a program makes of them, a loss, and a ``grad``; the gradient without one.

    The loss is of whole parameters and a part of the batch; unsharded it is the mean over the parts of the ranks.
    """
    program = program or (lambda params, loss, grad: grad(loss)(params))
    if isinstance(where, int):
        own = {name: p.detach() for name, p in model.named_parameters()}
        batches = parts(batch, where)
        return program(own, lambda p: torch.stack([loss(p, **part) for part in batches]).mean(), torch.func.grad)
    params = fs.shard(model, fs.plan(model, where))
    run = where.spmd(lambda p, batch: program(p, lambda p: loss(fs.gather(p), **batch), fs.grad))
    return fs.gather(run(params, where.split(dict(batch))), lazy=False)


def hessian_product(task: Task, where: Where) -> dict[str, Any]:
    """The product of the loss's Hessian with the parameters, forward over reverse."""
    model = task.made()
    loss = lambda p, **part: task.loss(functional_call(model, p, (), part))  # noqa: E731
    product = lambda p, loss, grad: jvp(grad(loss), (p,), (p,))[1]  # noqa: E731
    return {"product": whole_of(where, model, task.batch(), loss, product)}


def tree_step(params: Any, grads: Any, rate: float = RATE) -> Any:
    """One step of gradient descent on any tree."""
    return optree.tree_map(lambda p, g: p - rate * g, params, grads)


def fully_sharded(model: nn.Module) -> nn.Module:
    """The model with one unit for each layer that has parameters, and one around them."""
    for module in reversed([*model.modules()]):  # inner ones first
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
