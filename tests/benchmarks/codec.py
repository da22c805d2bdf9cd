"""What int8 gathers cost and save: bytes, the time of a step on two gloo ranks, and the loss of the GPT example.

python -m tests.benchmarks.codec                  # 200 steps of the example, 6 seeds: six minutes on two cores
python -m tests.benchmarks.codec --steps 20 --rounds 3 --seeds 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import functorch_shard as fs
from functorch_shard.testing import count_collectives, run_ranks
from tests.benchmarks.contenders import ours
from tests.benchmarks.workloads import WORKLOADS

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
CODECS = {"float32": None, "int8": fs.codecs.int8()}
WARM_UP = 2
LAST = 20  # batches that a training loss is the mean of


def steps_on_this_rank(rounds: int) -> dict[str, Any]:
    """Milliseconds of every step, in turns, and the bytes that one of them gathers."""
    work, device = WORKLOADS["gpt"], torch.device("cpu")
    steps, times, nbytes = {}, {name: [] for name in CODECS}, {}
    batch = work.batch(dist.get_rank(), 1)
    for name, codec in CODECS.items():
        torch.manual_seed(0)
        steps[name] = ours(work, False, device, reshard=True, codec=codec)
        with count_collectives() as seen:
            steps[name](*batch)
        nbytes[name] = seen.nbytes("all_gather")
    for i in range(WARM_UP + rounds):
        for name in list(CODECS)[:: 1 if i % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            steps[name](*batch)
            dist.barrier()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: {"ms": statistics.median(times[name][WARM_UP:]), "bytes": nbytes[name]} for name in CODECS}


def example(codec: str, steps: int, seed: int) -> dict[str, float]:
    """Losses of the GPT example on four simulated ranks, after ``steps``: of the last batches, and held out."""
    options = ["--steps", str(steps), "--seed", str(seed), "--json", "--codec", codec]
    command = [sys.executable, str(EXAMPLE), *options]
    environ = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])}
    out = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True, env=environ)
    results = json.loads(out.stdout.splitlines()[-1])
    return {"train": statistics.mean(results["losses"][-LAST:]), "held out": results["val_bits_per_byte"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--steps", type=int, default=200, help="of the example")
    parser.add_argument("--seeds", type=int, default=6, help="one run of the example alone tells little: chaos")
    parser.add_argument("--rounds", type=int, default=9, help="of the timing")
    args = parser.parse_args()
    rows = run_ranks(steps_on_this_rank, 2, args.rounds, timeout=900)[0]
    plain, coded = rows["float32"], rows["int8"]
    print(f"bytes of a step's gathers: {plain['bytes']:,} as float32, {coded['bytes']:,} as int8", end=", ")
    print(f"ratio {coded['bytes'] / plain['bytes']:.4f}")
    print(
        f"step on two gloo ranks: {plain['ms']:.0f} ms and {coded['ms']:.0f} ms, ratio {coded['ms'] / plain['ms']:.2f}"
    )
    runs = {codec: [example(codec, args.steps, seed) for seed in range(args.seeds)] for codec in ("none", "int8")}
    for name in ("train", "held out"):
        exact, quantized = ([run[name] for run in runs[codec]] for codec in ("none", "int8"))
        each = ", ".join(f"{b / a:.4f}" for a, b in zip(exact, quantized, strict=True))
        means = statistics.mean(exact), statistics.mean(quantized)
        print(
            f"{name} after {args.steps} steps, mean of {args.seeds} seeds: {means[0]:.4f} and {means[1]:.4f}", end=", "
        )
        print(f"ratio {means[1] / means[0]:.4f} (seed by seed {each})")


if __name__ == "__main__":
    main()
