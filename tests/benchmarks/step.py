"""A training step against the peers, interleaved in one run on the same model and data.

python -m tests.benchmarks.step                          # everything: about ten minutes on two cores
python -m tests.benchmarks.step --cases small --rounds 3 # the short form
python -m tests.benchmarks.step --json step.json --memory
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from functorch_shard.testing import run_ranks
from tests.benchmarks.contenders import CONTENDERS
from tests.benchmarks.workloads import WORKLOADS


@dataclass(frozen=True)
class Case:
    """What is trained, on how many ranks."""

    workload: str
    num_ranks: int
    batch: int
    bf16: bool = False

    @property
    def name(self) -> str:
        dtype = "bf16" if self.bf16 else "fp32"
        return f"{self.workload}, {dtype}, {self.num_ranks} ranks, batch {self.batch}"

    def contenders(self) -> list[str]:
        return [name for name in CONTENDERS if not (self.bf16 and name == "DDP")]  # it has no such policy


CASES = {
    "gpt-4": Case("gpt", 2, 4),
    "gpt-1": Case("gpt", 2, 1),
    "gpt-1-4ranks": Case("gpt", 4, 1),
    "gpt-4-4ranks": Case("gpt", 4, 4),
    "gpt-4-bf16": Case("gpt", 2, 4, bf16=True),
    "gpt-1-bf16": Case("gpt", 2, 1, bf16=True),
    "small": Case("small", 2, 4),
}
WARM_UP = 2
# Malloc gives every large block back to the system at once: slower, but what is resident is what is in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def times_on_this_rank(case: Case, names: Sequence[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds and losses of every step of every contender, in turns."""
    work, device = WORKLOADS[case.workload], torch.device("cpu")
    steps = {name: build(name, case, device) for name in names}
    batch = work.batch(dist.get_rank(), case.batch)
    result: dict[str, dict[str, list[float]]] = {name: {"ms": [], "loss": []} for name in names}
    for i in range(WARM_UP + rounds):
        for name in [*names[i % len(names) :], *names[: i % len(names)]]:  # nobody always follows the same one
            dist.barrier()
            start = time.perf_counter()
            loss = steps[name](*batch)
            dist.barrier()  # the step of the slowest rank
            result[name]["ms"].append(1e3 * (time.perf_counter() - start))
            result[name]["loss"].append(loss.item())
    for series in result.values():
        del series["ms"][:WARM_UP]
    return result


def build(name: str, case: Case, device: torch.device) -> Callable[..., torch.Tensor]:
    torch.manual_seed(0)
    return CONTENDERS[name](WORKLOADS[case.workload], case.bf16, device)


def memory_on_this_rank(case: Case, name: str) -> float:
    """Peak resident MB of five steps, above what the process had before the model."""
    before = _status("VmRSS")
    step = build(name, case, torch.device("cpu"))
    batch = WORKLOADS[case.workload].batch(dist.get_rank(), case.batch)
    for _ in range(5):
        step(*batch)
    return _status("VmHWM") - before


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def memory(case: Case, name: str) -> float:
    """In a new process, whose malloc starts with its own thresholds."""
    key = next(key for key, known in CASES.items() if known == case)
    command = [sys.executable, "-m", "tests.benchmarks.step", "--peak-of", name, "--cases", key]
    out = subprocess.run(command, env={**os.environ, **MALLOC}, capture_output=True, text=True, timeout=900, check=True)
    return float(out.stdout.split()[-1])


def check_losses(case: Case, losses: dict[str, list[float]]) -> None:
    """All contenders that communicate compute the same losses; ours with and without resharding are equal."""
    reference = losses["FSDP2"] if "FSDP2" in losses else next(iter(losses.values()))
    tolerance = 2e-2 if case.bf16 else 1e-4
    for name, series in losses.items():
        if name != "compute alone":
            worst = max(abs(a - b) / abs(b) for a, b in zip(series, reference, strict=True))
            if worst > tolerance:
                raise AssertionError(f"{case.name}: {name} differs from FSDP2 by {worst:.1e} of the loss")
    if {"ours", "ours, no reshard"} <= losses.keys() and losses["ours"] != losses["ours, no reshard"]:
        raise AssertionError(f"{case.name}: resharding changes the losses")


def run(case: Case, names: Sequence[str], rounds: int, with_memory: bool) -> dict[str, Any]:
    ranks = run_ranks(times_on_this_rank, case.num_ranks, case, names, rounds, timeout=3000)
    check_losses(case, {name: ranks[0][name]["loss"] for name in names})
    rows: dict[str, Any] = {}
    for name in names:
        times = ranks[0][name]["ms"]
        peer = "FSDP2, no reshard" if name.endswith("no reshard") else "FSDP2"
        ratios = [a / b for a, b in zip(times, ranks[0].get(peer, ranks[0][name])["ms"], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows[name] = {"ms": statistics.median(times), "ratio": quartiles[1], "quartiles": [quartiles[0], quartiles[2]]}
        rows[name]["times"] = times
        rows[name]["losses"] = ranks[0][name]["loss"]
        if with_memory:
            rows[name]["peak_mb"] = memory(case, name)
    return {**asdict(case), "name": case.name, "rounds": rounds, "rows": rows}


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['name']}: median ms, ratio to FSDP2 with the same resharding (quartiles), peak MB"]
    for name, row in result["rows"].items():
        low, high = row["quartiles"]
        peak = f"{row['peak_mb']:7.0f}" if "peak_mb" in row else "      -"
        lines.append(f"  {name:18s} {row['ms']:8.1f}   {row['ratio']:.2f} ({low:.2f} to {high:.2f}) {peak}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", action="store_true", help="peak memory too, each contender in processes of its own")
    parser.add_argument("--json", help="write everything measured to this file")
    parser.add_argument("--peak-of", choices=CONTENDERS, help=argparse.SUPPRESS)  # what --memory starts
    options = parser.parse_args()
    if options.peak_of:
        case = CASES[options.cases[0]]
        print(max(run_ranks(memory_on_this_rank, case.num_ranks, case, options.peak_of, timeout=800)))
        return
    results = []
    for key in options.cases:
        case = CASES[key]
        results.append(run(case, options.contenders or case.contenders(), options.rounds, options.memory))
        print(table(results[-1]), flush=True)
    if options.json:
        machine = {"machine": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__}
        Path(options.json).write_text(json.dumps({**machine, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
