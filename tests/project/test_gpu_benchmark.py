"""The benchmark that waits for a GPU runs here at toy size, so that ten minutes on one are not spent on mending it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_contender_runs_at_toy_size_and_has_the_losses_of_the_plain_model(tmp_path: Path) -> None:
    command = ["-m", "tests.benchmarks.gpu", "--device", "cpu", "--tiny", "--json", str(tmp_path / "gpu.json")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    tables = json.loads((tmp_path / "gpu.json").read_text())["tables"]
    assert len(tables) == 6  # two models at three sizes
    for title, rows in tables.items():
        plain = next(iter(rows.values()))
        for name, row in rows.items():
            assert row["warnings"] == [], (title, name)
            assert ("error" in row) == ("CUDA graphs" in name), (title, name, row)
            assert row.get("losses", plain["losses"]) == plain["losses"], (title, name)
        assert f"| {next(iter(rows))} |" in out.stdout
