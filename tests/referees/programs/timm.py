"""Models of timm: residual networks with BatchNorm, transformers, and per-sample gradients."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import functorch_shard as fs
from tests.referees.referee import Referee, Where
from tests.referees.training import Batch, Task, parts, rows_of, trained, tree_step

VIT: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
CONVNEXT: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (4, 8, 8, 16)}


def made(name: str, **options: Any) -> Any:
    return import_module("timm").create_model(name, num_classes=5, **options)


def images(size: int) -> Batch:
    return {"x": torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def of_logits(logits: Tensor) -> Tensor:
    return logits.square().mean()


def task(name: str, size: int, checkpointing: str = "", **options: Any) -> Task:
    return Task(partial(made, name, **options), partial(images, size), of_logits, checkpointing)


def with_statistics(where: Where) -> dict[str, Any]:
    """Parameters and the mean of the ranks' BatchNorm statistics after two steps."""
    network = task("resnet10t", 32).made()
    params: Any = {name: p.detach().clone() for name, p in network.named_parameters()}
    buffers = {name: x.clone() for name, x in network.named_buffers()}
    if isinstance(where, int):
        for _ in range(2):
            params, buffers = _plain_step(network, params, buffers, parts(images(32), where))
        return {"parameters": params, "buffers": buffers}
    params = fs.shard(network, fs.plan(network, where))
    rows = {name: x.expand(where.size, *x.shape) if where.is_simulated else x for name, x in buffers.items()}

    @where.spmd
    def step(params: fs.Sharded, buffers: Any, x: Tensor) -> Any:
        def loss(params: fs.Sharded) -> Any:
            logits, new = fs.apply(network, params, buffers, x)
            return of_logits(logits), new

        grads, new = fs.grad(loss, has_aux=True)(params)
        mean = {n: fs.collectives.pmean(b, where) if b.is_floating_point() else b for n, b in new.items()}
        return tree_step(params, grads), mean

    for _ in range(2):
        params, rows = step(params, rows, where.split(images(32)["x"]))
    return {"parameters": fs.gather(params, lazy=False), "buffers": rows}


def _plain_step(network: nn.Module, params: Any, buffers: Any, batches: Any) -> Any:
    """One step with the mean of the parts' gradients and statistics."""
    gradients, statistics = [], []
    for batch in batches:
        statistics.append({name: x.clone() for name, x in buffers.items()})
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        value = of_logits(functional_call(network, leaves | statistics[-1], (batch["x"],)))
        grads = torch.autograd.grad(value, [*leaves.values()])
        gradients.append(dict(zip(leaves, grads, strict=True)))
    mean = lambda *xs: torch.stack(xs).mean(0) if xs[0].is_floating_point() else xs[0]  # noqa: E731
    return tree_step(params, tree_map(mean, *gradients)), tree_map(mean, *statistics)


def per_sample(where: Where) -> dict[str, Any]:
    """Norms of the gradients of single images."""
    network = task("vit_tiny_patch16_224", 16, **VIT).made()

    def norms(full: Any, x: Tensor) -> Tensor:
        one = lambda p, x: F.cross_entropy(functional_call(network, p, (x[None],)), torch.tensor([1]))  # noqa: E731
        grads = vmap(grad(one), (None, 0))(full, x)
        return torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)

    return {"each norm": rows_of(where, network, images(16), norms)}


def of(name: str, program: Any, **options: Any) -> Referee:
    return Referee("timm", name, program, **options)


CHECKPOINTED = "saved tensor hooks"
REFEREES = [
    of("ResNet, BatchNorm by fs.apply", with_statistics),
    of("ViT", partial(trained, task("vit_tiny_patch16_224", 16, **VIT))),
    of("ConvNeXt", partial(trained, task("convnext_atto", 32, **CONVNEXT))),
    of(
        "ViT, checkpointing",
        partial(trained, task("vit_tiny_patch16_224", 16, "set_grad_checkpointing", **VIT)),
        batched=CHECKPOINTED,
    ),
    of(
        "ResNet, checkpointing",  # BatchNorm in what is run again
        partial(trained, task("resnet10t", 32, "set_grad_checkpointing")),
        batched="running_mean",
    ),
    of("ViT, gradients of single images", per_sample),
]
