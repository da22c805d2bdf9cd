"""What a user waits for: a step on eight simulated ranks, and the import of the package.

python -m tests.benchmarks.quick
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import torch
from torch import nn

import functorch_shard as fs
from tests.benchmarks.contenders import training_step
from tests.benchmarks.tools import in_turns

STEP_LIMIT_MS, IMPORT_LIMIT_MS = 50.0, 250.0


def spread(times: list[float]) -> tuple[float, float, float]:
    """The median, and the fastest and slowest."""
    return statistics.median(times), min(times), max(times)


def step_ms() -> tuple[float, float, float]:
    """One training step of a two-layer MLP on eight simulated ranks: gather, gradient, reduction, AdamW."""
    mesh, model = fs.simulated_mesh(8), nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    update, args = training_step(model, fs.plan(model, mesh), nn.functional.cross_entropy, donate=False)
    step, args = mesh.spmd(update), [*args, *mesh.split((torch.randn(64, 64), torch.randint(10, (64,))))]
    return spread(in_turns({"step": lambda: step(*args)}, 50, warm_up=3)["step"])


def import_ms() -> tuple[float, float, float]:
    """What ``import functorch_shard`` takes once torch is there, in new processes, from bytecode as pip leaves it."""
    code = "import torch, time; t = time.perf_counter(); import functorch_shard; print(1e3 * (time.perf_counter() - t))"
    command = [sys.executable, "-c", code]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = [
        float(subprocess.run(command, capture_output=True, check=True, timeout=120, env=env).stdout) for _ in range(6)
    ][1:]  # the first writes the bytecode
    return spread(times)


def main() -> int:
    rows = [
        ("step, 8 simulated ranks, two-layer MLP", step_ms(), STEP_LIMIT_MS),
        ("import on top of torch's", import_ms(), IMPORT_LIMIT_MS),
    ]
    for name, (median, low, high), limit in rows:
        print(f"{name}: median {median:.1f} ms ({low:.1f} to {high:.1f}), limit of the fastest {limit:.0f} ms")
    return int(any(fastest > limit for _, (_, fastest, _), limit in rows))  # medians tell how busy the machine is


if __name__ == "__main__":
    sys.exit(main())
