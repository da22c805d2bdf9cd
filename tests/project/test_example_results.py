"""Examples at toy size: each exits with an error unless its results are those of the same program on whole tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import functorch_shard as fs
from tests.support.pool import run_ranks
from tests.support.scripts import example, printed_by

file_of_tests = example("unit_test_your_sharding")
test_a_step_does_not_depend_on_ranks = file_of_tests.test_a_step_does_not_depend_on_ranks
test_every_wrong_collective_of_a_step_is_noticed = file_of_tests.test_every_wrong_collective_of_a_step_is_noticed
test_on_gloo_ranks, test_on_simulated_ranks = file_of_tests.test_on_gloo_ranks, file_of_tests.test_on_simulated_ranks
test_the_laws_notice_a_gradient_that_is_not_reduced = file_of_tests.test_the_laws_notice_a_gradient_that_is_not_reduced
FOLDER = Path(__file__).parents[2] / "examples"
TEXT = ["--text", str(FOLDER / "train_gpt.py")]
TOY = {
    "agents.py": ["--steps", "2", "--batch-size", "16"],
    "contrastive.py": ["--steps", "2", "--batch-size", "16"],
    "diloco.py": ["--steps", "2", "--inner", "2", "--codec", "int8"],
    "evolution.py": ["--steps", "1"],
    "force_field.py": ["--steps", "2", "--molecules", "8"],
    "lanczos.py": ["--steps", "2", "--batch-size", "2", *TEXT],
    "lora.py": ["--steps", "2", "--pretrain-steps", "2", "--batch-size", "2", *TEXT],
    "long_context.py": ["--steps", "2", "--batch-size", "2", *TEXT],
    "maml.py": ["--steps", "2"],
    "moe.py": ["--steps", "2", "--batch-size", "2", *TEXT],
    "muon_gpt.py": ["--steps", "2", "--batch-size", "2", *TEXT],
    "pipeline.py": ["--steps", "2", "--batch-size", "4", "--microbatches", "4", *TEXT],
    "pinn.py": ["--steps", "2", "--points", "8"],
    "production.py": ["--epochs", "1", *TEXT],
    "schedules.py": ["--steps", "2", "--batch-size", "4", "--microbatches", "4", *TEXT],
}
ELSEWHERE = {
    "tests/project/test_examples.py": {"gpt.py", "train_gpt.py"},
    "tests/referees/test_examples.py": {"dp_sgd.py", "hf_llama.py", "influence.py"},
    "tests/virtual/test_same_bits.py": {"same_bits.py"},
    "here": {"diloco_unsharded.py", "mixture.py", "side_by_side.py", "stacks.py", "unit_test_your_sharding.py"},
}


def test_every_example_has_a_test() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(TOY).union(*ELSEWHERE.values())


@pytest.mark.parametrize("ranks", ["gloo", "simulated"])  # in this order those that take long are simulated by default
@pytest.mark.parametrize("name", TOY)
def test_results_are_those_of_the_unsharded_program(name: str, ranks: str) -> None:
    script, options = str(FOLDER / name), TOY[name]
    if ranks == "simulated":
        outputs = [printed_by(script, *options, "--ranks", "2")]
    else:
        outputs = run_ranks(printed_by, 2, script, *options)
    tables = [output for output, _ in outputs]
    assert re.match(r"Mesh\(.*=2.*\) +sharded +unsharded +difference\n", tables[0])
    assert "a rank passes" in tables[0]
    assert "a rank holds" in tables[0]
    assert tables[1:] == [""] * len(tables[1:]), "the first rank alone prints"


@pytest.mark.parametrize("name", ["contrastive.py", "force_field.py", "maml.py", "muon_gpt.py", "pinn.py"])
def test_an_example_fails_where_gradients_are_not_reduced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fs.simulated_mesh(2).with_backend(fs.communication.skip("psum_scatter", "psum"))
    monkeypatch.setattr(example("side_by_side"), "ranks", lambda _: broken)
    with pytest.raises(SystemExit, match="1"):
        printed_by(str(FOLDER / name), *TOY[name])
