"""Whether other ranks show that a program has one wrong collective."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import functorch_shard as fs
from functorch_shard.debug import types
from functorch_shard.testing import assert_rank_invariant, mutants
from tests.mutants.programs import AXES, EQUIVALENT, FLOAT32, PROGRAMS


@dataclass
class Outcome:
    """The mutants of one program: those that were noticed, those that are the program, with why, and the others."""

    program: str
    noticed: list[str] = field(default_factory=list)
    equivalent: dict[str, str] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)  # of types, about the program itself
    seconds: float = 0.0

    @property
    def number(self) -> int:
        return len(self.noticed) + len(self.equivalent) + len(self.missed)


def reason(program: str, mutant: str) -> str | None:
    """Why a mutant is the program, if it is listed."""
    found = (why for of, which, why in EQUIVALENT if re.search(of, program) and re.search(which, mutant))
    return next(found, None)


def outcomes(name: str = "", every: int = 1, first: int = 0) -> Iterator[Outcome]:
    """Yield the outcome of each program whose name has ``name`` in it, of one of ``every`` mutants."""
    for program, run in PROGRAMS.items():
        if name not in program:
            continue
        outcome, start = Outcome(program), time.perf_counter()
        names = next((names for of, names in AXES.items() if of in program), ("one", "replicate", "shard"))
        one, four = dict.fromkeys(names, 1), {name: 1 if name == "one" else 2 for name in names}
        close = {"rtol": 1e-4, "atol": 1e-6} if any(name in program for name in FLOAT32) else {}
        check = partial(assert_rank_invariant, meshes=[one, four], **{"rtol": 1e-9, "atol": 1e-11, **close})
        check(run)  # the program itself raises no alarm
        outcome.alarms = [*types(run, fs.simulated_mesh(four)).problems]
        for mutant in mutants(run, fs.simulated_mesh(four))[first::every]:
            why, noticed = reason(program, str(mutant)), mutant.is_noticed_by(check)
            if noticed:
                outcome.noticed.append(str(mutant))
            elif why:
                outcome.equivalent[str(mutant)] = why
            else:
                outcome.missed.append(str(mutant))
        outcome.seconds = time.perf_counter() - start
        yield outcome
