"""What a user waits for: a step and a gather on eight simulated ranks, and the import of the package.

python -m tests.benchmarks.quick
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import functorch_shard as fs
from tests.benchmarks.simulated_step import adamw_step

STEP_LIMIT_MS, IMPORT_LIMIT_MS = 50.0, 250.0


def median_ms(fn: Callable[[], object], runs: int) -> tuple[float, float, float]:
    """The median, and the fastest and slowest run."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        fn()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times), max(times)


def step_ms() -> tuple[float, float, float]:
    """One training step of a two-layer MLP on eight simulated ranks: gather, gradient, reduction, AdamW."""
    mesh, model = fs.simulated_mesh(8), nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    step, args = adamw_step(mesh, model, nn.functional.cross_entropy)
    args += mesh.split((torch.randn(64, 64), torch.randint(10, (64,))))
    for _ in range(3):
        step(*args)
    return median_ms(lambda: step(*args), 50)


def import_ms() -> tuple[float, float, float]:
    """What ``import functorch_shard`` takes once torch is there, in new processes, from bytecode as pip leaves it."""
    code = "import torch, time; t = time.perf_counter(); import functorch_shard; print(1e3 * (time.perf_counter() - t))"
    command = [sys.executable, "-c", code]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = [
        float(subprocess.run(command, capture_output=True, check=True, timeout=120, env=env).stdout) for _ in range(6)
    ][1:]  # the first writes the bytecode
    return statistics.median(times), min(times), max(times)


def gather_ratio() -> float:
    """What ``gather`` takes on simulated ranks, against plain tensors at once: the median of interleaved runs."""
    mesh, model = fs.simulated_mesh(8), nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    params = fs.shard(model, fs.plan(model, mesh))
    calls = [
        mesh.spmd(lambda p, lazy=lazy: list(fs.gather(p, lazy=lazy).values()), out_dims=0) for lazy in (None, False)
    ]
    pairs = [[median_ms(lambda call=call: call(params), 1)[0] for call in calls] for _ in range(60)]
    return statistics.median(mine / plain for mine, plain in pairs[5:])


def main() -> int:
    rows = [
        ("step, 8 simulated ranks, two-layer MLP", step_ms(), STEP_LIMIT_MS),
        ("import on top of torch's", import_ms(), IMPORT_LIMIT_MS),
    ]
    for name, (median, low, high), limit in rows:
        print(f"{name}: median {median:.1f} ms ({low:.1f} to {high:.1f}), limit {limit:.0f} ms")
    print(f"gather, 8 simulated ranks: {gather_ratio():.2f} of the time of gather(lazy=False)")
    return int(any(median > limit for _, (median, _, _), limit in rows))


if __name__ == "__main__":
    sys.exit(main())
