"""examples/lora.py: nothing is spent on the frozen base, and the adapters learn as in plain torch."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import functorch_shard as fs
from tests.support.pool import run_ranks
from tests.support.scripts import printed_by

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = str(EXAMPLES.parent / "README.md")
STEPS, RANKS, BATCH_SIZE, SEED, LORA_RANK = 4, 2, 2, 3, 4


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """What the example prints on each kind of ranks."""
    numbers = f"--steps {STEPS} --batch-size {BATCH_SIZE} --seed {SEED} --rank {LORA_RANK} --pretrain-steps 0"
    script, options = str(EXAMPLES / "lora.py"), [*numbers.split(), "--text", TEXT, "--json"]
    printed = {
        "simulated": printed_by(script, *options, "--ranks", str(RANKS)),
        "gloo": run_ranks(printed_by, RANKS, script, *options)[0],
    }
    return {ranks: json.loads(output.splitlines()[-1]) for ranks, (output, _) in printed.items()}


def test_the_base_is_gathered_in_its_two_bytes_never_reduced_and_has_no_state(
    results: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = import_module("lora")
    layout = fs.plan(example.adapted(example.GPT(), LORA_RANK, torch.bfloat16), fs.simulated_mesh(RANKS))

    def shard_bytes(trainable: bool, *units: str) -> int:
        of_units = [b for b in layout.buffers.values() if b.trainable == trainable and b.key.startswith(units or "")]
        return sum(b.shard_numel * b.dtype.itemsize for b in of_units)

    base, adapters = shard_bytes(False), shard_bytes(True)
    # Real ranks gather again in backward: down to the first adapter; the last block and the head are still there.
    for ranks, again in (("simulated", ()), ("gloo", ("blocks.0", "blocks.1"))):
        assert results[ranks]["traffic"] == {
            "bfloat16: all_gather": base + (shard_bytes(False, *again) if again else 0),
            "float32: all_gather": adapters + (shard_bytes(True, *again) if again else 0),
            "float32: psum_scatter": RANKS * adapters,
        }
    counts = 4 * 3  # one float32 step count for each block's adapters
    for result in results.values():
        held = [result[f"{name}_bytes"] for name in ("base", "adapter", "gradient", "state")]
        assert held == [base, adapters, adapters, 2 * adapters + counts]
        assert result["base_unchanged"]
        assert result["adapters_read_equal"]
        assert result["merged_difference"] < 2e-5


def test_simulated_and_gloo_ranks_learn_as_a_plain_torch_loop_does(
    results: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to one rounding to bfloat16, which a difference in the last bit of a float32 may turn the other way."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = import_module("lora")
    torch.manual_seed(SEED)
    model = example.adapted(example.GPT(), LORA_RANK, torch.bfloat16)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for x, y in example.batches(example.read_text(TEXT), STEPS, RANKS * BATCH_SIZE, SEED + 1):
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    for result in results.values():
        assert result["losses"] == pytest.approx(losses, abs=2**-9)
