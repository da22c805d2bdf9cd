"""Optimizers of pytorch-optimizer: those that step element by element, whole parameters, and those that are refused."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import functorch_shard as fs
from tests.referees.programs.curvature import made
from tests.referees.programs.torchopt import own
from tests.referees.referee import Referee, Where


def gradients(seed: int) -> dict[str, Tensor]:
    """Given, and not computed: some classes amplify the rounding of a mean over ranks, SOAP by its eigenvectors."""
    torch.manual_seed(seed)
    return {name: torch.randn_like(p) for name, p in own().items()}


def stepped(
    where: Where, package: str, kind: str, whole: bool = False, elementwise: bool = False, **options: Any
) -> dict[str, Any]:
    """Parameters after three steps of a class of a package."""
    cls = getattr(import_module(package), kind)
    if isinstance(where, int):
        params = {name: torch.nn.Parameter(p.clone()) for name, p in own().items()}
        optimizer = cls([*params.values()], **options)
        getattr(optimizer, "train", list)()
        for seed in range(3):
            grads = gradients(seed)
            for name, p in params.items():
                p.grad = grads[name]
            optimizer.step()
        return {"parameters": params}
    optimizer = fs.optimizer(cls, whole=whole, elementwise=elementwise, **options)
    params = fs.shard(made(), layout := fs.plan(made(), where))
    state = optimizer.init(params)
    for seed in range(3):
        params, state = optimizer.step(params, grads=fs.shard(gradients(seed), layout), state=state)
    return {"parameters": fs.gather(params, lazy=False)}


def of(kind: str, package: str = "pytorch_optimizer", refused: str = "", **options: Any) -> Referee:
    name = f"{kind}, whole=True" if options.get("whole") else kind
    return Referee(package, name, partial(stepped, package=package, kind=kind, **options), refused=refused)


UNKNOWN = "not a class of torch.optim that is known to update each element by itself"
REFEREES = [
    *(of(kind, elementwise=True, lr=0.05) for kind in ("Lion", "Tiger", "AdaBelief", "AdEMAMix")),
    *(of(kind, lr=0.05, refused=UNKNOWN) for kind in ("NovoGrad", "Lamb", "Prodigy")),
    of("SOAP", lr=0.05, refused=UNKNOWN),
    *(of(kind, whole=True, lr=0.05) for kind in ("SOAP", "Shampoo", "CAME", "LARS")),
]
