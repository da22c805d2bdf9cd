"""Whether other ranks show that a program has one wrong collective."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context

import functorch_shard as fs
from functorch_shard.debug import types
from functorch_shard.testing import assert_rank_invariant, mutants
from tests.mutants.programs import AXES, EQUIVALENT, FLOAT32, PROGRAMS, SEQUENTIAL, TOLD


@dataclass
class Outcome:
    """The mutants of one program: those that were noticed, those that are the program, with why, and the others."""

    program: str
    noticed: list[str] = field(default_factory=list)
    equivalent: dict[str, str] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)  # about the program itself
    seconds: float = 0.0

    @property
    def number(self) -> int:
        return len(self.noticed) + len(self.equivalent) + len(self.missed)


def reason(program: str, mutant: str) -> str | None:
    """Why a mutant is the program, if it is listed."""
    found = (why for of, which, why in EQUIVALENT if re.search(of, program) and re.search(which, mutant))
    return next(found, None)


def outcome(program: str, every: int = 1, first: int = 0) -> Outcome:
    """The outcome of one program, of one of ``every`` mutants."""
    run, outcome, start = PROGRAMS[program], Outcome(program), time.perf_counter()
    names = next((names for of, names in AXES.items() if of in program), ("one", "replicate", "shard"))
    sizes = dict.fromkeys(names, 1), {name: 1 if name == "one" else 2 for name in names}
    kind = "sequential" if program in SEQUENTIAL else "batched"
    one, four = (fs.simulated_mesh(each, kind=kind) for each in sizes)
    close = {"rtol": 1e-4, "atol": 1e-6} if program in FLOAT32 else {"rtol": 1e-9, "atol": 1e-11}
    check = partial(assert_rank_invariant, meshes=[one, four], **close)
    try:
        check(run)
    except Exception as error:  # one that differs, or that these ranks refuse
        return replace(outcome, alarms=[str(error)])
    told = next((told for of, told in TOLD.items() if of in program), "$^")
    problems = types(run, four).problems if kind == "batched" else ()
    outcome.alarms = [problem for problem in problems if not re.search(told, problem)]
    for mutant in mutants(run, four)[first::every]:
        why, noticed = reason(program, str(mutant)), mutant.is_noticed_by(check)
        if noticed:
            outcome.noticed.append(str(mutant))
        elif why:
            outcome.equivalent[str(mutant)] = why
        else:
            outcome.missed.append(str(mutant))
    outcome.seconds = time.perf_counter() - start
    return outcome


def outcomes(name: str = "", every: int = 1, first: int = 0, processes: int = 1) -> Iterator[Outcome]:
    """Yield the outcome of each program whose name has ``name`` in it, of one of ``every`` mutants."""
    chosen = partial(outcome, every=every, first=first), [each for each in PROGRAMS if name in each]
    if processes == 1:
        yield from map(*chosen)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(*chosen)
