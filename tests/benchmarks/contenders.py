"""One training step of the same model by this library and by its peers: functions of a batch, each with its state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import functorch_shard as fs
from tests.benchmarks.workloads import Workload

Step = Callable[[Tensor, Tensor], Tensor]
LR = 1e-3


def training_step(
    model: nn.Module,
    layout: fs.Layout,
    loss: Callable[[Tensor, Tensor], Tensor],
    donate: bool = True,
    lazy: bool | None = None,
) -> tuple[Callable[..., Any], list[Any]]:
    """``step(params, state, x, y)`` of AdamW, which returns new ones and the loss, and its first two arguments."""
    params, opt = fs.shard(model, layout), fs.optimizer(torch.optim.AdamW, lr=LR)

    def loss_of(params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(model, fs.gather(params, lazy=lazy), (x,)), y)

    def step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads, value = fs.grad_and_value(loss_of)(params, x, y)
        return *opt.step(params, grads=grads, state=state, donate=donate), value

    return step, [params, opt.init(params)]


def ours(
    work: Workload,
    bf16: bool,
    device: torch.device,
    *,
    reshard: bool,
    compiled: str | None = None,
    donate: bool = True,
    lazy: bool | None = None,
    replicas: int = 1,
    units: Any = "auto",
    on: Callable[[], fs.Mesh] | None = None,
) -> Step:
    axes = {"shard": -1} if replicas == 1 else {"replicate": replicas, "shard": -1}
    mesh, model = on() if on else fs.init_mesh(axes, device=device.type), work.model().to(device)
    precision = fs.MixedPrecision(torch.bfloat16, torch.float32) if bf16 else None
    layout = fs.plan(model, mesh, units=units, reshard_after_forward=reshard, precision=precision)
    train, trees = training_step(model, layout, work.loss, donate=donate, lazy=lazy)
    model.to("meta")  # the shards are all that is needed
    update = fs.compile(train, backend=compiled) if compiled else train

    def step(x: Tensor, y: Tensor) -> Tensor:
        *trees[:], loss = update(*trees, _cast(x, bf16), y)
        return loss

    return step


def fsdp2(
    work: Workload, bf16: bool, device: torch.device, *, reshard: bool, compiled: bool = False, replicas: int = 1
) -> Step:
    ranks = torch.distributed.get_world_size()
    sizes, names = ((ranks,), ("shard",)) if replicas == 1 else ((replicas, ranks // replicas), ("replicate", "shard"))
    mesh = torch.distributed.init_device_mesh(device.type, sizes, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    model: Any = work.model().to(device)
    for block in model.blocks:
        if compiled:  # as torchtitan does: each block by itself
            block.compile()
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return _stateful(model, work)


def ddp(work: Workload, bf16: bool, device: torch.device) -> Step:
    return _stateful(DistributedDataParallel(work.model().to(device)), work)


def alone(work: Workload, bf16: bool, device: torch.device) -> Step:
    """Pure compute: every rank by itself, nothing communicated; in bfloat16 everything is stored in it."""
    model = work.model().to(device)
    return _stateful(model.bfloat16() if bf16 else model, work, bf16)


def _stateful(model: nn.Module, work: Workload, bf16: bool = False) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = work.loss(model(_cast(x, bf16)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _cast(x: Tensor, bf16: bool) -> Tensor:
    return x.bfloat16() if bf16 and x.is_floating_point() else x


CONTENDERS: dict[str, Callable[[Workload, bool, torch.device], Step]] = {
    "ours": partial(ours, reshard=True),
    "FSDP2": partial(fsdp2, reshard=True),
    "ours, no reshard": partial(ours, reshard=False),
    "FSDP2, no reshard": partial(fsdp2, reshard=False),
    "ours, replay": partial(ours, reshard=True, compiled="replay"),
    "ours, inductor": partial(ours, reshard=True, compiled="inductor"),
    "FSDP2, compiled blocks": partial(fsdp2, reshard=True, compiled=True),
    "DDP": ddp,
    "compute alone": alone,
}


def takes_replicas(name: str) -> bool:
    """Whether this contender shards in groups of ranks, with copies in others."""
    return getattr(CONTENDERS[name], "func", None) in (ours, fsdp2)
