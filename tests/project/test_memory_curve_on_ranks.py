"""The picture of memory beside FSDP2 is that of a run: the one that its command makes has the same peaks."""

from __future__ import annotations

import json

import pytest

from functorch_shard.testing import run_ranks
from tests.benchmarks.memory_curve import CONTENDERS, PHASES, RANKS, curves_on_this_rank
from tests.support.pages import ROOT

DRAWN = json.loads((ROOT / "docs/_static/memory.json").read_text())["MiB"]


def peak(curves: dict[str, list[float]]) -> float:
    return max(map(max, curves.values()))


def test_a_step_takes_less_memory_than_that_of_fsdp2() -> None:
    assert [[*curves] for curves in DRAWN.values()] == [[*PHASES]] * 2
    assert peak(DRAWN["functorch_shard"]) < peak(DRAWN["FSDP2"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENDERS)
def test_another_run_has_the_peak_that_is_drawn(name: str) -> None:
    assert peak(run_ranks(curves_on_this_rank, RANKS, name)[0]) == pytest.approx(peak(DRAWN[name]), rel=0.02)
