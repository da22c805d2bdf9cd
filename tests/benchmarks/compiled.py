"""A whole step on simulated ranks, eagerly and as a recorded graph, in turns; and what a recording costs.

python -m tests.benchmarks.compiled --rounds 50    # 8 simulated ranks, an MLP with AdamW: half a minute

On real ranks: ``python -m tests.benchmarks.step --contenders ours "ours, replay" "ours, inductor"``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import functorch_shard as fs
from tests.benchmarks.simulated_step import adamw_step


def step_of(mesh: fs.Mesh) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    step, trees = adamw_step(mesh, model, F.cross_entropy)
    batch = mesh.split((torch.randn(8 * mesh.size, 64), torch.randint(10, (8 * mesh.size,))))
    return step, [*trees, *batch]


def milliseconds(fn: Any, args: list[Any]) -> float:
    start = time.perf_counter()
    fn(*args)
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--backends", nargs="+", default=["replay", "inductor"])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    step, args = step_of(fs.simulated_mesh(chosen.ranks))
    steps = {"eager": step, **{backend: fs.compile(step, backend=backend) for backend in chosen.backends}}
    first = {name: milliseconds(fn, args) for name, fn in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(chosen.rounds):
        for name, fn in steps.items():
            times[name].append(milliseconds(fn, args))
    eager = statistics.median(times["eager"])
    print(f"{chosen.ranks} simulated ranks, an MLP 64-256-10 with AdamW: median ms, ratio to eager, first call in ms")
    for name in steps:
        median = statistics.median(times[name])
        print(f"  {name:10s} {median:8.2f}  {median / eager:.3f}  {first[name]:8.0f}")


if __name__ == "__main__":
    main()
