"""python -m tests.fuzz --seeds 0:3000 --ranks batched,sequential,gloo --log fuzz.jsonl    # goes on where it stopped
python -m tests.fuzz --seed 17 --show      # the program and its model as text

A program that does not end after --timeout seconds ends this one, with the stacks of all threads; the log has it.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.tools import command_line
from tests.fuzz.programs import draw
from tests.fuzz.running import Outcome, outcome_of

KINDS = ["batched", "sequential", "gloo"]
SHOWN = ["right", "refused", "void", "WRONG", "raw", "hang"]
Job = tuple[int, str]


def main() -> None:
    known: dict[str, Any] = {"seeds": "0:100", "seed": None, "ranks": ",".join(KINDS), "log": None}
    chosen = command_line(__doc__, **known, timeout=90.0, show=False)
    torch.set_num_threads(1)
    first, last = map(int, chosen.seeds.split(":"))
    seeds = range(first, last) if chosen.seed is None else [int(chosen.seed)]
    jobs = [(seed, kind) for seed in seeds for kind in chosen.ranks.split(",")]
    if chosen.show:
        sys.stdout.writelines(f"{draw(seed)}\n{draw(seed).model()}\n" for seed in seeds)
    else:
        sys.stdout.write(report(run(jobs, chosen.log and Path(chosen.log), chosen.timeout), jobs))


def run(jobs: list[Job], log: Path | None, timeout: float) -> dict[Job, Outcome]:
    """In the log a program hangs until it has ended."""
    lines = log.read_text().splitlines() if log and log.exists() else []
    outcomes = {(seed, kind): Outcome(*rest) for seed, kind, *rest in map(json.loads, lines)}

    def keep(job: Job, outcome: Outcome) -> None:
        outcomes[job] = outcome
        if log:
            with log.open("a") as file:
                file.write(json.dumps([*job, outcome.kind, outcome.text]) + "\n")

    for job in jobs:
        if job not in outcomes:
            keep(job, Outcome("hang", f"no outcome in {timeout:g} s, or the process died"))
            faulthandler.dump_traceback_later(timeout, exit=True)
            keep(job, outcome_of(draw(job[0]), job[1]))
            faulthandler.cancel_dump_traceback_later()
    return outcomes


def report(outcomes: dict[Job, Outcome], jobs: list[Job]) -> str:
    counts = Counter((kind, outcomes[seed, kind].kind) for seed, kind in jobs)
    kinds = list(dict.fromkeys(kind for _, kind in jobs))
    lines = ["| ranks | " + " | ".join(SHOWN) + " |", "|---|" + "---|" * len(SHOWN)]
    lines += [f"| {kind} | " + " | ".join(str(counts[kind, name]) for name in SHOWN) + " |" for kind in kinds]
    bad = [job for job in jobs if outcomes[job].kind in ("WRONG", "raw", "hang")]
    lines += [f"{seed} {kind} {outcomes[seed, kind].kind}: {outcomes[seed, kind].text[:300]}" for seed, kind in bad]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
