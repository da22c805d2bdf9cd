"""Launchers: two gloo ranks that another program starts have the losses of two simulated ranks, and of plain torch."""

from __future__ import annotations

from typing import Any

from tests.referees.launching import STEPS
from tests.referees.referee import Referee, Where
from tests.support.launching import PROGRAM, TOLERANCE, unsharded
from tests.support.ranks import Ranks

KINDS = (Ranks({"shard": 2}), Ranks({"shard": 2}, "gloo"))


def program(where: Where) -> dict[str, Any]:
    return {"losses": unsharded(STEPS) if isinstance(where, int) else PROGRAM["train"](where, STEPS)}


def by(package: str, launcher: str, name: str) -> Referee:
    return Referee(package, name, program, tolerance=TOLERANCE, kinds=KINDS, launcher=launcher)


REFEREES = [
    by("torch", "torchrun", "torchrun"),
    by("lightning_fabric", "fabric", "Fabric.launch"),
    by("accelerate", "accelerate", "debug_launcher"),
    by("accelerate", "accelerate_launch", "launch"),
    by("ray", "ray", "TorchTrainer"),
    by("submitit", "submitit", "local executor"),
]
