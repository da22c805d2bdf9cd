"""Launchers: two gloo ranks that another program starts have the losses of two simulated ranks, and of plain torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

from tests.referees.referee import Referee, Where
from tests.support.launching import LAUNCH, PROGRAM, RANKS, TOLERANCE, environ, losses, printed, unsharded
from tests.support.ranks import Ranks

STEPS = 5
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), f"{LAUNCH}/train.py")
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(RANKS), "--num_machines", "1")
COMMANDS: dict[str, Sequence[str]] = {
    "torchrun": TORCHRUN,
    "fabric": (f"{LAUNCH}/fabric_launch.py", "--devices", str(RANKS)),
    "accelerate": (f"{LAUNCH}/accelerate_launch.py", "--debug", str(RANKS)),
    "accelerate_launch": (*ACCELERATE, f"{LAUNCH}/train.py"),
    "ray": (f"{LAUNCH}/ray_train.py", "--workers", str(RANKS)),
    "submitit": (f"{LAUNCH}/submitit_job.py", "--cluster", "local", "--tasks", str(RANKS)),
}
LOGS = {"submitit": "--logs", "ray": "--logs"}  # where a launcher writes files


def results(name: str) -> list[dict[str, Any]]:
    """What each of two ranks has, by rank."""
    with TemporaryDirectory() as folder:
        logs = [LOGS[name], folder] if name in LOGS else []
        command = [sys.executable, *COMMANDS[name], "--steps", str(STEPS), *logs]
        env = environ(RAY_DEDUP_LOGS="0")  # Ray leaves out lines that differ in numbers
        output = printed(command, envs=[env])
    found = losses(output)
    assert sorted(found) == [*range(RANKS)], output
    return [{"losses": found[rank]} for rank in range(RANKS)]


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
