"""What communication costs in a training step: the step with parts of it left out, interleaved in one run.

python -m tests.benchmarks.apart                      # the GPT on two gloo ranks: about two minutes on two cores
python -m tests.benchmarks.apart --ranks 4 --batch 1 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from functorch_shard.communication import Counter, checked, without_all_gather, without_reduction
from functorch_shard.testing import run_ranks
from tests.benchmarks.contenders import CONTENDERS, ours
from tests.benchmarks.workloads import WORKLOADS

WARM_UP = 2
PARTS: dict[str, Any] = {
    "whole step": (),
    "without all-gather": (without_all_gather,),
    "without reduction": (without_reduction,),
    "without both": (without_all_gather, without_reduction),
    "whole step, counted": (),  # and a Counter of its own
    "whole step, checked": (checked,),
}
STEPS: dict[str, Any] = {name: partial(ours, reshard=True, through=through) for name, through in PARTS.items()}
STEPS["compute alone"] = CONTENDERS["compute alone"]


def times_on_this_rank(workload: str, batch: int, rounds: int) -> tuple[dict[str, list[float]], str]:
    """Milliseconds of every step, in turns, and what was counted in one of them."""
    work, counter = WORKLOADS[workload], Counter()
    steps = {**STEPS, "whole step, counted": partial(ours, reshard=True, through=[counter])}
    runs = {name: build(work, False, torch.device("cpu")) for name, build in steps.items()}
    data, names = work.batch(dist.get_rank(), batch), list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(WARM_UP + rounds):
        counter.clear()
        for name in [*names[i % len(names) :], *names[: i % len(names)]]:  # nobody always follows the same one
            start = now_on_all_ranks()
            runs[name](*data)
            times[name].append(1e3 * (now_on_all_ranks() - start))  # the step of the slowest rank
    return {name: series[WARM_UP:] for name, series in times.items()}, str(counter)


def now_on_all_ranks() -> float:
    dist.barrier()
    return time.perf_counter()


def table(times: dict[str, list[float]]) -> str:
    whole = times["whole step"]
    lines = ["                         ms   of the whole step, quartiles"]
    for name, series in times.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(series, whole, strict=True)], n=4)
        lines.append(f"{name:20s} {statistics.median(series):8.1f}   {middle:.2f} ({low:.2f} to {high:.2f})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="gpt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    arguments = (chosen.workload, chosen.batch, chosen.rounds)
    times, counted = run_ranks(times_on_this_rank, chosen.ranks, *arguments, timeout=3000)[0]
    print(f"{chosen.workload}, {chosen.ranks} gloo ranks, batch {chosen.batch}: medians of {chosen.rounds} rounds")
    print(table(times), "", "one step of rank 0, counted:", counted, sep="\n")


if __name__ == "__main__":
    main()
