"""What curvature libraries have for a plain model, from the operators of a sharded loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.curvature import Operator, gauss_newton, hessian

SAMPLES = 8


def _layers(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5, **options), nn.Tanh(), nn.Linear(5, 4, **options))


MODEL = _layers(device="meta")  # for functional_call


def made(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return _layers().to(dtype)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.to(dtype), torch.arange(SAMPLES) % 4


def direction(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def operator(kind: str, mesh: fs.Mesh, dtype: torch.dtype = torch.float64) -> Operator:
    """Of the cross entropy of the model, on shards."""
    model = made(dtype)
    params = fs.shard(model, fs.plan(model, mesh))

    def predict(params: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(model, fs.gather(params), (x,))

    def losses(params: fs.Sharded, xy: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(predict(params, xy[0]), xy[1], reduction="none")

    kinds: dict[str, Callable[..., Operator]] = {
        "hessian": hessian(lambda p, x, y: F.cross_entropy(predict(p, x), y)),
        "gauss_newton": gauss_newton(predict, F.cross_entropy),
        "fisher": lambda p, *xy: gauss_newton(losses, lambda each: each.square().mean() / 2)(p, xy),
    }
    return mesh.spmd(kinds[kind])(params, *mesh.split(data(dtype)))
