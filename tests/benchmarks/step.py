"""A training step against the peers, interleaved in one run on the same model and data.

python -m tests.benchmarks.step --memory --json step.json    # everything: a quarter of an hour on two cores
python -m tests.benchmarks.step --cases small --rounds 3     # the short form
python -m tests.benchmarks.step --two-hosts --cases gpt-4 gpt-1    # a rank on each of two hosts, over sockets alone
torchrun --nproc-per-node 2 -m tests.benchmarks.step --device cuda --cases gpt-4 gpt-1    # on GPUs, over NCCL
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import torch
import torch.distributed as dist

from functorch_shard.testing import run_ranks
from tests.benchmarks.contenders import CONTENDERS, takes_replicas
from tests.benchmarks.tools import command_line, in_turns, now_on_all_ranks, quartiles
from tests.benchmarks.workloads import WORKLOADS
from tests.support.two_hosts import on_two_hosts


@dataclass(frozen=True)
class Case:
    """What is trained, on how many ranks, and on which device."""

    workload: str
    num_ranks: int
    batch: int
    bf16: bool = False
    device: str = "cpu"
    replicas: int = 1

    @property
    def name(self) -> str:
        dtype = "bf16" if self.bf16 else "fp32"
        ranks = f"{self.replicas} x {self.num_ranks // self.replicas}" if self.replicas > 1 else self.num_ranks
        return f"{self.workload}, {dtype}, {ranks} ranks, batch {self.batch}, {self.device}"

    def contenders(self) -> list[str]:
        names = [name for name in CONTENDERS if not (self.bf16 and name == "DDP")]  # it has no such policy
        return [name for name in names if self.replicas == 1 or takes_replicas(name)]


CASES = {
    "gpt-4": Case("gpt", 2, 4),
    "gpt-1": Case("gpt", 2, 1),
    "gpt-4-4ranks": Case("gpt", 4, 4),
    "gpt-1-4ranks": Case("gpt", 4, 1),
    "gpt-1-hybrid": Case("gpt", 4, 1, replicas=2),
    "gpt-4-bf16": Case("gpt", 2, 4, bf16=True),
    "gpt-1-bf16": Case("gpt", 2, 1, bf16=True),
    "small": Case("small", 2, 4),
}
WARM_UP = 2
# Malloc gives every large block back to the system at once: slower, but what is resident is what is in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
Series = dict[str, dict[str, list[float]]]


def times_on_this_rank(case: Case, names: Sequence[str], rounds: int) -> Series:
    """Milliseconds and losses of every step of every contender, in turns: of the slowest rank."""
    steps, batch = {name: build(name, case) for name in names}, _batch(case)
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def now() -> float:
        if case.device == "cuda":
            torch.cuda.synchronize()
        return now_on_all_ranks()

    calls = {name: lambda name=name: losses[name].append(steps[name](*batch)) for name in names}
    ms = in_turns(calls, rounds, WARM_UP, now)
    return {name: {"ms": ms[name], "loss": [x.item() for x in losses[name]]} for name in names}


def build(name: str, case: Case) -> Callable[..., torch.Tensor]:
    torch.manual_seed(0)
    options = {"replicas": case.replicas} if case.replicas > 1 else {}
    return CONTENDERS[name](WORKLOADS[case.workload], case.bf16, torch.device(case.device), **options)


def _batch(case: Case) -> list[torch.Tensor]:
    return [x.to(case.device) for x in WORKLOADS[case.workload].batch(dist.get_rank(), case.batch)]


def memory_on_this_rank(case: Case, name: str) -> tuple[float, float]:
    """MB that this rank holds between steps, what a compiler keeps too, and the most that five steps take in addition:
    its own memory, and its part of what the ranks share, looked at each millisecond together."""

    def now(shared: Iterable[int] = ()) -> float:
        own = 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])
        return (own + sum(512 * os.fstat(file).st_blocks for file in shared) / case.num_ranks) / 2**20

    before = now()
    step, batch = build(name, case), _batch(case)
    for _ in range(WARM_UP + 1):
        step(*batch)
    files = [int(path.name) for path in Path("/proc/self/fd").iterdir() if "/memfd:" in str(path.resolve())]
    shared = {os.fstat(file).st_ino: file for file in sorted(files, reverse=True)}.values()  # maps have some too
    gc.collect()
    held, seen, done = now(shared), [0.0], Event()

    def look() -> None:
        while not done.wait(0.001):
            seen.append(now(shared) - held)

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        for _ in range(5):
            step(*batch)
        done.set()
        looking.result()
    return held - before, max(seen)


def memory(key: str, name: str) -> list[float]:
    """In new processes, whose malloc starts with its own thresholds."""
    command = [sys.executable, "-m", "tests.benchmarks.step", "--peak-of", name, "--cases", key]
    out = subprocess.run(command, env={**os.environ, **MALLOC}, capture_output=True, text=True, timeout=900, check=True)
    return [float(word) for word in out.stdout.split()[-2:]]


def check_losses(case: Case, losses: dict[str, list[float]]) -> None:
    """All that communicate compute the same losses; this library the same ones bitwise, with and without resharding."""
    reference = losses.get("FSDP2") or next(iter(losses.values()))
    tolerance = 2e-2 if case.bf16 else 1e-4
    for name, series in losses.items():
        worst = max(abs(a - b) / abs(b) for a, b in zip(series, reference, strict=True))
        if worst > tolerance and name != "compute alone":
            raise AssertionError(f"{case.name}: {name} differs from FSDP2 by {worst:.1e} of the loss")
    if {"ours", "ours, no reshard"} <= losses.keys() and losses["ours"] != losses["ours, no reshard"]:
        raise AssertionError(f"{case.name}: resharding changes the losses")


def run(key: str, case: Case, names: Sequence[str], rounds: int, with_memory: bool) -> dict[str, Any]:
    if "RANK" in os.environ:
        series = times_on_this_rank(case, names, rounds)
    else:
        series = run_ranks(times_on_this_rank, case.num_ranks, case, names, rounds, timeout=3000)[0]
    check_losses(case, {name: series[name]["loss"] for name in names})
    rows = {name: summary(name, series) for name in names}
    for name in names if with_memory else []:
        rows[name]["held_mb"], rows[name]["step_mb"] = memory(key, name)
    return {**asdict(case), "name": case.name, "rounds": rounds, "rows": rows}


def summary(name: str, series: Series) -> dict[str, Any]:
    times = series[name]["ms"]
    peer = series.get("FSDP2, no reshard" if name.endswith("no reshard") else "FSDP2", series[name])["ms"]
    ratios = [a / b for a, b in zip(times, peer, strict=True)]
    low, middle, high = quartiles(ratios)
    median = statistics.median(times)
    ratio = {"ratio": middle, "quartiles": [low, high], "ratio_of_medians": median / statistics.median(peer)}
    return {"ms": median, **ratio, "times": times, "losses": series[name]["loss"]}


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['name']}: median ms, ratio to FSDP2 with the same resharding (quartiles)"]
    if any("held_mb" in row for row in result["rows"].values()):
        lines[0] += ", MB held + in a step"
    for name, row in result["rows"].items():
        low, high = row["quartiles"]
        sizes = " + ".join(f"{row[key]:4.0f}" for key in ("held_mb", "step_mb") if key in row)
        lines.append(f"  {name:22s} {row['ms']:8.1f}   {row['ratio']:.2f} ({low:.2f} to {high:.2f})  {sizes}".rstrip())
    return "\n".join(lines)


def main() -> None:
    lists, flags = {"cases": [*CASES], "contenders": [*CONTENDERS]}, {"memory": False, "two_hosts": False}
    chosen = command_line(__doc__, **lists, **flags, rounds=15, device="cpu", json=None, peak_of="")
    if chosen.two_hosts:
        sys.exit(run_on_two_hosts([word for word in sys.argv[1:] if word != "--two-hosts"]))
    if chosen.peak_of:
        case = CASES[chosen.cases[0]]
        print(*max(run_ranks(memory_on_this_rank, case.num_ranks, case, chosen.peak_of, timeout=800)))
        return
    cases = {key: CASES[key] for key in chosen.cases}
    if "RANK" in os.environ:
        cases = _cases_of_torchrun(cases, chosen.device)
    results = []
    for key, case in cases.items():
        names = [name for name in chosen.contenders if name in case.contenders()]
        results.append(run(key, case, names, chosen.rounds, chosen.memory))
        if os.environ.get("RANK", "0") == "0":
            print(table(results[-1]), flush=True)
    if chosen.json and os.environ.get("RANK", "0") == "0":
        machine = {"machine": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__}
        Path(chosen.json).write_text(json.dumps({**machine, "cases": results}, indent=1))


def run_on_two_hosts(arguments: Sequence[str]) -> int:
    """This benchmark by torchrun on each of two hosts; the exit status."""
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --node-rank $number --master-addr first"
    script = f"exec {torchrun} -m tests.benchmarks.step {shlex.join(arguments)}"
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder:
        return subprocess.run(on_two_hosts(Path(folder), script), env=environ, check=False).returncode


def _cases_of_torchrun(cases: dict[str, Case], device: str) -> dict[str, Case]:
    """On as many ranks as there are."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    return {key: replace(case, num_ranks=dist.get_world_size(), device=device) for key, case in cases.items()}


if __name__ == "__main__":
    main()
