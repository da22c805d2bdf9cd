"""python -m tests.fuzz --seeds 0:3000 --ranks batched,sequential,gloo
python -m tests.fuzz --seed 17 --show      # the program and its model as text

A program that does not end after --timeout seconds ends this one, with its seed and the stacks of all threads. The exit
status is 1 if a result is wrong, or an error is of neither this library nor torch's vmap.
"""

from __future__ import annotations

import faulthandler
import sys
from collections import Counter
from typing import Any

import torch

from tests.benchmarks.tools import command_line
from tests.fuzz.programs import draw
from tests.fuzz.running import Outcome, outcome_of

KINDS = ["batched", "sequential", "gloo"]
BAD = ["WRONG", "raw", "hang"]
SHOWN = ["right", "refused", "void", *BAD]
Job = tuple[int, str]


def main() -> None:
    known: dict[str, Any] = {"seeds": "0:100", "seed": None, "ranks": ",".join(KINDS)}
    chosen = command_line(__doc__, **known, timeout=90.0, show=False)
    torch.set_num_threads(1)
    first, last = map(int, chosen.seeds.split(":"))
    seeds = range(first, last) if chosen.seed is None else [int(chosen.seed)]
    jobs = [(seed, kind) for seed in seeds for kind in chosen.ranks.split(",")]
    if chosen.show:
        sys.stdout.writelines(f"{draw(seed)}\n{draw(seed).model()}\n" for seed in seeds)
    else:
        outcomes = {job: run(job, chosen.timeout) for job in jobs}
        sys.stdout.write(report(outcomes))
        sys.exit(any(outcome.kind in BAD for outcome in outcomes.values()))


def run(job: Job, timeout: float) -> Outcome:
    sys.stderr.write("\r{} {}".format(*job))  # what is left standing if the process dies
    faulthandler.dump_traceback_later(timeout, exit=True)
    outcome = outcome_of(draw(job[0]), job[1])
    faulthandler.cancel_dump_traceback_later()
    return outcome


def report(outcomes: dict[Job, Outcome]) -> str:
    counts = Counter((kind, outcome.kind) for (_, kind), outcome in outcomes.items())
    kinds = list(dict.fromkeys(kind for _, kind in outcomes))
    lines = ["| ranks | " + " | ".join(SHOWN) + " |", "|---|" + "---|" * len(SHOWN)]
    lines += [f"| {kind} | " + " | ".join(str(counts[kind, name]) for name in SHOWN) + " |" for kind in kinds]
    bad = {job: outcome for job, outcome in outcomes.items() if outcome.kind in BAD}
    lines += [f"{seed} {kind} {outcome.kind}: {outcome.text[:300]}" for (seed, kind), outcome in bad.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
