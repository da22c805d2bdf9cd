"""examples/lora.py: nothing is spent on the frozen base, and the adapters learn as in plain torch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import functorch_shard as fs
from tests.support.pool import run_ranks
from tests.support.scripts import printed_by

ROOT = Path(__file__).parents[2]
STEPS, RANKS, BATCH_SIZE, SEED, LORA_RANK = 4, 2, 2, 3, 4


def run_both(base_dtype: str) -> dict[str, dict[str, Any]]:
    """The results that the example prints."""
    numbers = f"--steps {STEPS} --batch-size {BATCH_SIZE} --seed {SEED} --rank {LORA_RANK} --pretrain-steps 0"
    options = [*numbers.split(), "--base-dtype", base_dtype, "--text", str(ROOT / "README.md"), "--json"]
    script = str(ROOT / "examples" / "lora.py")
    printed = {
        "simulated": printed_by(script, *options, "--ranks", str(RANKS)),
        "gloo": run_ranks(printed_by, RANKS, script, *options)[0],
    }
    return {ranks: json.loads(output.splitlines()[-1]) for ranks, (output, _) in printed.items()}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return run_both("bfloat16")


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("lora", ROOT / "examples" / "lora.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def layout(example: Any) -> fs.Layout:
    return fs.plan(example.adapted(example.GPT(), LORA_RANK, torch.bfloat16), fs.simulated_mesh(RANKS))


def shard_bytes(layout: fs.Layout, trainable: bool, unit: str = "") -> int:
    buffers = [buffer for buffer in layout.buffers.values() if buffer.trainable == trainable]
    return sum(b.shard_numel * b.dtype.itemsize for b in buffers if b.key.startswith(unit))


def test_base_and_adapters_of_a_block_are_two_buffers_of_one_unit(layout: fs.Layout) -> None:
    kinds = {unit.name: [(b.dtype, b.trainable) for b in unit.buffers] for unit in layout.units}
    assert kinds["blocks.0"] == [(torch.bfloat16, False), (torch.float32, True)]
    assert kinds["norm"] == [(torch.bfloat16, False)]  # and the head, a small neighbour


def test_the_base_has_no_gradient_and_no_optimizer_state(results: dict[str, dict[str, Any]], layout: fs.Layout) -> None:
    adapters, counts = shard_bytes(layout, trainable=True), 4 * 3  # one float32 step count for each block's adapters
    for result in results.values():
        assert result["base_bytes"] == shard_bytes(layout, trainable=False)
        assert result["adapter_bytes"] == result["gradient_bytes"] == adapters
        assert result["state_bytes"] == 2 * adapters + counts


def test_the_base_is_gathered_in_its_two_bytes_and_never_reduced(
    results: dict[str, dict[str, Any]], layout: fs.Layout
) -> None:
    base, adapters = (shard_bytes(layout, trainable) for trainable in (False, True))
    assert results["simulated"]["traffic"] == {
        "bfloat16: all_gather": base,
        "float32: all_gather": adapters,
        "float32: psum_scatter": RANKS * adapters,
    }
    # Real ranks gather again in backward: down to the first adapter; the last block and the head are still there.
    again = ("blocks.0", "blocks.1")
    assert results["gloo"]["traffic"] == {
        "bfloat16: all_gather": base + sum(shard_bytes(layout, False, unit) for unit in again),
        "float32: all_gather": adapters + sum(shard_bytes(layout, True, unit) for unit in again),
        "float32: psum_scatter": RANKS * adapters,
    }


def test_the_base_keeps_every_bit_and_the_adapters_are_worth_their_file(results: dict[str, dict[str, Any]]) -> None:
    for result in results.values():
        assert result["base_unchanged"]
        assert result["adapters_read_equal"]
        assert result["merged_difference"] < 2e-5


# What is rounded to bfloat16, to 2 ** -9, may be rounded the other way after a difference in the last bit of a float32.
@pytest.mark.parametrize(("base_dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2**-9)])
def test_simulated_and_gloo_ranks_learn_as_a_plain_torch_loop_does(
    base_dtype: str, tolerance: float, results: dict[str, dict[str, Any]], example: Any
) -> None:
    losses = train_unsharded(example, getattr(torch, base_dtype))
    assert losses[-1] < losses[0] - 0.5
    for result in (results if base_dtype == "bfloat16" else run_both(base_dtype)).values():
        assert result["losses"] == pytest.approx(losses, abs=tolerance)


def train_unsharded(example: Any, dtype: torch.dtype) -> list[float]:
    """The same adapters on the same base and data, in ordinary torch."""
    torch.manual_seed(SEED)
    model = example.adapted(example.GPT(), LORA_RANK, dtype)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for x, y in example.batches(example.read_text(str(ROOT / "README.md")), STEPS, RANKS * BATCH_SIZE, SEED + 1):
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses
