"""Opacus: norms of per-sample gradients, and a step of DP-SGD with the noise of its optimizer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import functorch_shard as fs
from tests.referees.referee import Referee, Where
from tests.referees.training import rows_of

RATE, CLIP, NOISE, SAMPLES = 0.1, 0.05, 0.7, 8


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 7), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(7, 5)).double()


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 1, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.arange(SAMPLES) % 5


def per_sample_gradients(model: nn.Module, full: Any, x: Tensor, y: Tensor) -> Any:
    """By name, with a row for each sample."""

    def loss(full: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, full, (x[None],)), y[None])

    return vmap(grad(loss), (None, 0, 0))(full, x, y)


def norms_of(gradients: Any) -> Tensor:
    return torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)


def by_opacus(model: nn.Module) -> Any:
    """The model with per-sample gradients of a backward pass in it."""
    wrapped = import_module("opacus").GradSampleModule(model, loss_reduction="sum")
    x, y = data()
    F.cross_entropy(wrapped(x), y, reduction="sum").backward()
    return wrapped


def norms(where: Where) -> dict[str, Any]:
    model = made()
    if isinstance(where, int):
        samples = {name: p.grad_sample for name, p in by_opacus(model).named_parameters()}
        return {"each norms": norms_of(samples).view(where, -1)}
    batch = dict(zip("xy", data(), strict=True))
    return {"each norms": rows_of(where, model, batch, lambda p, x, y: norms_of(per_sample_gradients(model, p, x, y)))}


def private_step(where: Where) -> dict[str, Any]:
    """Parameters after a step: gradients clipped for each sample, added up, with noise."""
    model = made()
    if isinstance(where, int):
        wrapped = by_opacus(model)
        optimizer = import_module("opacus.optimizers").DPOptimizer(
            torch.optim.SGD(wrapped.parameters(), lr=RATE),
            noise_multiplier=NOISE,
            max_grad_norm=CLIP,
            expected_batch_size=SAMPLES,
            generator=torch.Generator().manual_seed(5),
        )
        optimizer.step()
        return {"parameters": dict(model.named_parameters())}
    generator = torch.Generator().manual_seed(5)  # the same on every rank, and the draws of the optimizer
    own = model.named_parameters()
    noise = {name: torch.empty_like(p).normal_(0, NOISE * CLIP, generator=generator) for name, p in own}
    layout = fs.plan(model, where)
    params = fs.shard(model, layout)

    @where.spmd
    def step(params: fs.Sharded, noise: fs.Sharded, x: Tensor, y: Tensor) -> fs.Sharded:
        gradients = per_sample_gradients(model, full := fs.gather(params), x, y)
        factors = (CLIP / (norms_of(gradients) + 1e-6)).clamp(max=1.0)
        clipped = {name: torch.tensordot(factors, g, 1) for name, g in gradients.items()}
        total = fs.scatter_grads(fs.Full(clipped, full.layout))  # the mean over ranks
        per_rank = SAMPLES / where.size
        return fs.Sharded(
            {k: p - RATE * (total[k] / per_rank + noise[k] / SAMPLES) for k, p in params.items()}, params.layout
        )

    return {"parameters": fs.gather(step(params, fs.shard(noise, layout), *where.split(data())), lazy=False)}


REFEREES = [
    Referee("opacus", "norms of per-sample gradients", norms),
    Referee("opacus", "a step of DP-SGD", private_step),
]
