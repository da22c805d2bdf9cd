"""Examples run with nothing but torch; simulated ranks, real ranks and a plain torch loop train the same GPT."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import functorch_shard as fs
from functorch_shard.testing import run_ranks
from tests.support.launching import ROOT, end, environ, printed, start
from tests.support.scripts import printed_by, printed_by_a_process

TRAIN_GPT = str(ROOT / "examples" / "train_gpt.py")
STEPS, RANKS, BATCH_SIZE = 5, 2, 2
TORCHRUN = f"-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node {RANKS}".split()
# A program as it is started, where nothing but the package's two dependencies is installed.
BARE = """
import os, runpy, sys
sys.modules.update(dict.fromkeys(["numpy", "safetensors", "hypothesis", "pytest"]))
sys.argv[:] = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TOY = {
    "lora.py": ["--steps", "2", "--pretrain-steps", "1", "--batch-size", "1", "--ranks", "3"],
    "train_gpt.py": ["--steps", "2", "--batch-size", "1", "--ranks", "3"],
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text to learn by heart\n" % i for i in range(400)))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOY)
def test_example_runs_at_toy_size_with_nothing_but_torch_and_the_package(name: str, text: str) -> None:
    assert printed([sys.executable, "-c", BARE, f"examples/{name}", *TOY[name], "--text", text, "--json"])


@pytest.fixture(scope="module")
def options(text: str) -> list[str]:
    return ["--steps", str(STEPS), "--batch-size", str(BATCH_SIZE), "--seed", "3", "--text", text, "--json"]


@pytest.fixture(scope="module")
def simulated(options: list[str]) -> dict[str, Any]:
    return results(printed_by(TRAIN_GPT, *options, "--ranks", str(RANKS))[0])


@pytest.fixture(scope="module")
def real(options: list[str]) -> dict[str, Any]:
    """By ranks that import nothing again; those that torchrun starts have the same outcome, below."""
    return results(run_ranks(printed_by, RANKS, TRAIN_GPT, *options)[0][0])


def results(output: str) -> dict[str, Any]:
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
def test_both_match_a_plain_unsharded_torch_loop(simulated: dict[str, Any], real: dict[str, Any], text: str) -> None:
    losses = train_unsharded(text)
    assert losses[-1] < losses[0] - 0.1
    assert simulated["losses"] == pytest.approx(losses, abs=1e-5)
    assert real["losses"] == pytest.approx(losses, abs=1e-5)


def train_unsharded(text: str) -> list[float]:
    """The same model, data and optimizer as the example, in ten lines of ordinary torch."""
    example = import_module("examples.gpt")
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


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_uninterrupted_one_and_passes_over_a_damaged_checkpoint(
    options: list[str], simulated: dict[str, Any], tmp_path: Path
) -> None:
    command = [TRAIN_GPT, *options, "--ranks", str(RANKS), "--dropout", "0.1", "--every", "2"]
    whole = results(printed_by(*command, "--checkpoint", str(tmp_path / "whole"))[0])
    assert whole["losses"][0] != simulated["losses"][0], "dropout is on"
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "whole", resumed)
    for step in ("step-000004", "step-000005"):
        damage(resumed / step / "__1_0.distcp")
    output, errors = printed_by_a_process(*command, "--checkpoint", str(resumed), "--resume")
    assert f"resumed from {resumed / 'step-000002'}" in errors
    assert outcome(results(output)) == outcome(whole)
    for step in ("step-000002", "step-000004", "step-000005"):
        assert not fs.checkpoint.verify(resumed / step)


@pytest.mark.slow
def test_a_run_resumed_on_another_number_of_ranks_has_the_same_losses(options: list[str], tmp_path: Path) -> None:
    command = [TRAIN_GPT, *options, "--global-batch", "6", "--every", "2"]
    two = results(printed_by(*command, "--ranks", "2", "--checkpoint", str(tmp_path / "two"))[0])
    three = tmp_path / "three"
    shutil.copytree(tmp_path / "two" / "step-000002", three / "step-000002")
    output, errors = printed_by_a_process(
        *command, "--ranks", "3", "--keep", "1", "--checkpoint", str(three), "--resume"
    )
    assert f"resumed from {three / 'step-000002'}" in errors
    assert results(output)["ranks"] == 3
    assert results(output)["losses"][:2] == two["losses"][:2]
    assert results(output)["losses"] == pytest.approx(two["losses"], rel=1e-6)
    assert os.listdir(three) == ["step-000005"]


def test_checkpoints_of_an_earlier_run_are_neither_overwritten_nor_taken_for_those_of_a_new_one(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fs.checkpoint.save(tmp_path / "step-000001", {"step": 1})
    argv = [TRAIN_GPT, "--text", text, "--checkpoint", str(tmp_path)]
    with patch.object(sys, "argv", argv), pytest.raises(SystemExit, match="2"):
        import_module("examples.train_gpt").main()
    refusal = f"{tmp_path} has checkpoints of an earlier run: pass --resume, or another directory"
    assert refusal in capsys.readouterr().err
    assert fs.checkpoint.load(tmp_path / "step-000001", {"step": 0}) == {"step": 1}


@pytest.mark.slow
def test_torchrun_brings_a_killed_rank_back_from_the_newest_checkpoint(
    options: list[str], real: dict[str, Any], tmp_path: Path
) -> None:
    save = ["--checkpoint", str(tmp_path), "--every", "1", "--resume"]
    process = start([sys.executable, *TORCHRUN, "--max-restarts", "3", TRAIN_GPT, *options, *save], environ())
    deadline = time.monotonic() + 120
    while not (saved := fs.checkpoint.latest(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.01)
    killed = children(process.pid)
    os.kill(killed[-1], signal.SIGKILL)
    try:
        output, errors = process.communicate(timeout=200)
    finally:
        end(process)
    assert process.returncode == 0, errors
    assert saved is not None
    assert len(killed) == RANKS
    assert "resumed from" in errors
    assert outcome(results(output)) == outcome(real)


@pytest.mark.slow
def test_a_job_that_is_killed_repeatedly_loses_no_checkpoint() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.kill_loop", "--kills", "2"]
    assert "bitwise those of the undisturbed job" in printed(command)


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in ("losses", "val_bits_per_byte", "digest")}


def damage(file: Path) -> None:
    """Another bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in table.splitlines() if int(line.split()[1]) == pid]
