"""The example, which starts its ranks itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "same_bits.py"


@pytest.mark.slow  # five processes import torch
def test_a_wrong_bit_of_one_rank_is_found_among_runs_of_the_same_bits() -> None:
    command = [sys.executable, str(SCRIPT), "--ranks", "1,2", "--steps", "3", "--bug", "1", "--json"]
    (line,) = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()
    found = json.loads(line)
    assert found["digests"]["1"] != found["digests"]["2"]
    (difference,) = found["first differences"]
    assert difference.startswith("step 1: 'grads.blocks.1.")
    assert "of unit 'blocks.1'" in difference
    assert difference.endswith("equal at step 0")
