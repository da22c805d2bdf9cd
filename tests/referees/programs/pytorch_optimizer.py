"""Optimizers of pytorch-optimizer: those that step element by element, whole parameters, and those that are refused."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import functorch_shard as fs
from tests.referees.programs.torchopt import own
from tests.referees.referee import Referee, Where
from tests.support.steps import by_shards, by_torch


def values(seed: int) -> dict[str, Tensor]:
    """Gradients are given, and not computed: some classes amplify the rounding of a mean over ranks, as SOAP does."""
    torch.manual_seed(seed)
    return {name: torch.randn_like(p) for name, p in own().items()} if seed else own()


def stepped(
    where: Where, package: str, kind: str, whole: bool = False, elementwise: bool = False, **options: Any
) -> dict[str, Any]:
    """Parameters after three steps of a class of a package."""
    cls = getattr(import_module(package), kind)
    if isinstance(where, int):
        return {"parameters": by_torch(values, 3, (cls, own(), options))}
    opt = fs.optimizer(cls, whole=whole, elementwise=elementwise, **options)
    return {"parameters": by_shards(opt, where, values, 3)}


def of(kind: str, package: str = "pytorch_optimizer", refused: str = "", **options: Any) -> Referee:
    name = f"{kind}, whole=True" if options.get("whole") else kind
    return Referee(package, name, partial(stepped, package=package, kind=kind, **options), refused=refused)


UNKNOWN = "it is not known to update each element by itself"
REFEREES = [
    *(of(kind, elementwise=True, lr=0.05) for kind in ("Lion", "Tiger", "AdaBelief", "AdEMAMix")),
    *(of(kind, lr=0.05, refused=UNKNOWN) for kind in ("NovoGrad", "Lamb", "Prodigy")),
    of("SOAP", lr=0.05, refused=UNKNOWN),
    *(of(kind, whole=True, lr=lr) for kind, lr in (("SOAP", 1e-3), ("Shampoo", 0.05), ("CAME", 0.05), ("LARS", 0.05))),
]
