"""Examples that need other packages, at toy size: each fails unless its results are those of the unsharded program."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pool import run_ranks
from tests.support.scripts import printed_by, printed_by_a_process

FOLDER = Path(__file__).parents[2] / "examples"
TOY = {
    "dp_sgd.py": ("sklearn", ["--steps", "3"]),
    "hf_llama.py": ("transformers", ["--steps", "2", "--layers", "1"]),
    "influence.py": ("sklearn", ["--steps", "5"]),
}


def printed(script: str, *arguments: str) -> tuple[str, str]:
    """As a function of this package, which other processes import with it: see torchvision_schemas.py."""
    return printed_by(script, *arguments)


@pytest.mark.parametrize("ranks", ["simulated", "gloo"])
@pytest.mark.parametrize("name", TOY)
def test_results_are_those_of_the_unsharded_program(name: str, ranks: str) -> None:
    package, options = TOY[name]
    pytest.importorskip(package)
    script = str(FOLDER / name)
    if ranks == "simulated":
        output, _ = printed_by_a_process(script, *options, "--ranks", "2", run=printed)  # hf_llama.py sets a dtype
    else:
        output, _ = run_ranks(printed, 2, script, *options)[0]
    assert "a rank passes" in output
