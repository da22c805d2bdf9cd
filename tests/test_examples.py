"""Every example runs at toy size; simulated ranks, real ranks and a plain torch loop train the same GPT."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
STEPS, RANKS, BATCH_SIZE = 5, 2, 2
TOY = {
    "lora.py": ["--steps", "2", "--pretrain-steps", "1", "--batch-size", "1", "--ranks", "3"],
    "train_gpt.py": ["--steps", "2", "--batch-size", "1", "--ranks", "3"],
}


def run(*command: str) -> str:
    """Standard output of a command in a process of its own, with this checkout's package."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text to learn by heart\n" % i for i in range(400)))
    return str(path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_at_toy_size(name: str, text: str) -> None:
    assert run(f"examples/{name}", *TOY[name], "--text", text, "--json")


@pytest.fixture(scope="module")
def options(text: str) -> list[str]:
    return ["--steps", str(STEPS), "--batch-size", str(BATCH_SIZE), "--seed", "3", "--text", text, "--json"]


@pytest.fixture(scope="module")
def simulated(options: list[str]) -> dict[str, Any]:
    return results(run("examples/train_gpt.py", *options, "--ranks", str(RANKS)))


@pytest.fixture(scope="module")
def real(options: list[str]) -> dict[str, Any]:
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        str(RANKS),
    ]
    return results(run(*torchrun, "examples/train_gpt.py", *options))


def results(output: str) -> dict[str, Any]:
    return json.loads(output.splitlines()[-1])


def test_the_last_line_is_one_json_object(simulated: dict[str, Any], real: dict[str, Any]) -> None:
    for result in (simulated, real):
        assert {"steps", "train_loss", "val_bits_per_byte", "tokens_per_s", "peak_rss_mb"} <= result.keys()
        assert result["steps"] == STEPS == len(result["losses"])
        assert result["train_loss"] == result["losses"][-1]
        assert 0 < result["val_bits_per_byte"] < 9
        assert result["peak_rss_mb"] > 50
    assert (simulated["simulated"], real["simulated"]) == (True, False)
    assert simulated["ranks"] == real["ranks"] == RANKS


def test_simulated_and_gloo_ranks_have_the_same_loss_at_every_step(
    simulated: dict[str, Any], real: dict[str, Any]
) -> None:
    assert simulated["losses"] == pytest.approx(real["losses"], abs=1e-5)
    assert simulated["val_bits_per_byte"] == pytest.approx(real["val_bits_per_byte"], abs=1e-5)


def test_both_match_a_plain_unsharded_torch_loop(simulated: dict[str, Any], real: dict[str, Any], text: str) -> None:
    losses = train_unsharded(text)
    assert losses[-1] < losses[0] - 0.1
    assert simulated["losses"] == pytest.approx(losses, abs=1e-5)
    assert real["losses"] == pytest.approx(losses, abs=1e-5)


def train_unsharded(text: str) -> list[float]:
    """The same model, data and optimizer as the example, in ten lines of ordinary torch."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    train_text, _ = example.read_text(text)
    torch.manual_seed(3)
    model, generator, losses = example.GPT(), torch.Generator().manual_seed(3), []
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    opt = torch.optim.AdamW([{"params": decayed}, *others], betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        starts = torch.randint(len(train_text) - example.CONTEXT, (RANKS * BATCH_SIZE,), generator=generator)
        x, y = example.windows(train_text, starts)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        for group in opt.param_groups:
            group["lr"] = example.schedule(step, STEPS)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses
