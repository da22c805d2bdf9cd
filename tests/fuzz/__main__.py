"""python -m tests.fuzz --seeds 0:3000 --ranks batched,sequential,gloo --log fuzz.jsonl    # goes on where it stopped
python -m tests.fuzz --seed 17 --show      # the program and its model as text
python -m tests.fuzz --seed 17 --shrink    # the simplest program that is found with that outcome
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.outcomes import Outcome, outcome_of
from tests.fuzz.programs import draw
from tests.fuzz.running import simplest

KINDS = ["batched", "sequential", "gloo"]
SHOWN = ["right", "refused", "void", "WRONG", "raw", "hang"]
Job = tuple[int, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", help="from:to")
    parser.add_argument("--seed", type=int, help="of one program")
    parser.add_argument("--ranks", default=",".join(KINDS))
    parser.add_argument("--log", type=Path, help="a file of outcomes; what it has is not run again")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds, after which a program hangs")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    first, last = map(int, chosen.seeds.split(":"))
    seeds = range(first, last) if chosen.seed is None else [chosen.seed]
    jobs = [(seed, kind) for seed in seeds for kind in chosen.ranks.split(",")]
    if chosen.show:
        sys.stdout.writelines(f"{draw(seed)}\n{draw(seed).model()}\n" for seed in seeds)
    elif chosen.shrink:
        sys.stdout.writelines(f"{seed} {kind}: {shrunk(seed, kind)}\n" for seed, kind in jobs)
    elif chosen.worker:
        work(jobs, chosen.log)
    else:
        with tempfile.TemporaryDirectory() as folder:
            log = chosen.log or Path(folder, "log")
            run(jobs, log, chosen.timeout)
            sys.stdout.write(report(read(log), jobs))


def shrunk(seed: int, kind: str) -> str:
    found = outcome_of(draw(seed), kind)

    def fails(program: Any) -> bool:
        now = outcome_of(program, kind)
        return now.kind == found.kind and (found.kind == "WRONG" or now.text[:40] == found.text[:40])

    return f"{found.kind}: {simplest(draw(seed), fails)}\n    {found.text}"


def work(jobs: list[Job], log: Path) -> None:
    done = read(log)
    for seed, kind in jobs:
        if (seed, kind) not in done:
            write(log, (seed, kind), outcome_of(draw(seed), kind))


def read(log: Path) -> dict[Job, Outcome]:
    lines = log.read_text().splitlines() if log.exists() else []
    return {(seed, kind): Outcome(*rest) for seed, kind, *rest in map(json.loads, lines)}


def write(log: Path, job: Job, outcome: Outcome) -> None:
    with log.open("a") as file:
        file.write(json.dumps([*job, outcome.kind, outcome.text]) + "\n")


def run(jobs: list[Job], log: Path, timeout: float) -> None:
    """In a process that is ended and started again where a program does not end."""
    log.touch()
    while left := [job for job in jobs if job not in read(log)]:
        seeds, kinds = f"{left[0][0]}:{left[-1][0] + 1}", ",".join(dict.fromkeys(kind for _, kind in jobs))
        options = ["--worker", "--seeds", seeds, "--ranks", kinds, "--log", str(log)]
        worker = subprocess.Popen([sys.executable, "-m", "tests.fuzz", *options])
        size, since = -1, time.monotonic()
        while worker.poll() is None and time.monotonic() - since < timeout:
            time.sleep(0.05)
            if log.stat().st_size != size:
                size, since = log.stat().st_size, time.monotonic()
        if worker.poll() != 0:
            worker.kill()
            worker.wait()
            stuck = next(job for job in left if job not in read(log))
            write(log, stuck, Outcome("hang", f"no outcome in {timeout:g} s, or the process died"))


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
