"""What is measured elsewhere or drawn runs here: the GPU benchmark at toy size, and the picture of memory anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from functorch_shard.testing import run_ranks
from tests.benchmarks.memory_curve import CONTENDERS, PHASES, RANKS, curves_on_this_rank
from tests.support.launching import printed
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


@pytest.mark.slow
def test_every_contender_runs_at_toy_size_and_has_the_losses_of_the_plain_model(tmp_path: Path) -> None:
    command = ["-m", "tests.benchmarks.gpu", "--device", "cpu", "--tiny", "--json", str(tmp_path / "gpu.json")]
    out = printed([sys.executable, *command], timeout=300)
    tables = json.loads((tmp_path / "gpu.json").read_text())["tables"]
    assert len(tables) == 8  # two models at three sizes, and offloaded
    for title, rows in tables.items():
        plain = next(iter(rows.values()))
        for name, row in rows.items():
            assert row["warnings"] == [], (title, name)
            assert ("error" in row) == ("CUDA graphs" in name), (title, name, row)
            assert row.get("losses", plain["losses"]) == plain["losses"], (title, name)
        assert f"| {next(iter(rows))} |" in out
