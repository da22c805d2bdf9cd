"""Launchers: two gloo ranks that another program starts have the steps of the unsharded loop."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.referees.programs.curvature import data, made
from tests.referees.referee import Referee, Where
from tests.referees.training import Batch, Task, trained
from tests.support.ranks import Ranks


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = made()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


def samples() -> Batch:
    return dict(zip("xy", data(), strict=True))


def itself(value: Tensor) -> Tensor:
    return value


def train(where: Where) -> dict[str, Any]:
    return trained(Task(Classifier, samples, itself), where)


def by(package: str, launcher: str, name: str) -> Referee:
    return Referee(package, name, train, kinds=(Ranks({"shard": 2}, "gloo"),), launcher=launcher)


REFEREES = [
    by("torch", "torchrun", "torchrun"),
    by("lightning_fabric", "fabric", "Fabric.launch"),
    by("accelerate", "accelerate", "debug_launcher"),
    by("ray", "ray", "TorchTrainer"),
]
