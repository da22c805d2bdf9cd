"""Simulated ranks, real ranks and a plain torch loop train the same GPT, and a job that is killed goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import functorch_shard as fs
from functorch_shard.testing import run_ranks
from tests.support.checkpoints import flip_a_bit
from tests.support.launching import ROOT, end, environ, start
from tests.support.scripts import example, printed_by, printed_by_a_process

TRAIN_GPT, PRODUCTION = (str(ROOT / "examples" / name) for name in ("train_gpt.py", "production.py"))
STEPS, RANKS, BATCH_SIZE = 5, 2, 2
TORCHRUN = f"-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node {RANKS}".split()


@pytest.mark.slow
def test_both_match_a_plain_unsharded_torch_loop(tmp_path: Path) -> None:
    """Real ranks import nothing again; those that torchrun starts have the same outcome, below."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(b"line %d of a text to learn by heart\n" % i for i in range(400)))
    options = f"--steps {STEPS} --batch-size {BATCH_SIZE} --seed 3 --text {text} --json".split()
    losses = train_unsharded(str(text))
    assert losses[-1] < losses[0] - 0.1
    simulated = printed_by(TRAIN_GPT, *options, "--ranks", str(RANKS))
    for output, _ in (simulated, run_ranks(printed_by, RANKS, TRAIN_GPT, *options)[0]):
        assert json.loads(output.splitlines()[-1])["losses"] == pytest.approx(losses, abs=1e-5)


def train_unsharded(text: str) -> list[float]:
    """The same model, data and optimizer as the example, in ten lines of ordinary torch."""
    gpt = example("gpt")
    train_text, _ = gpt.read_text(text)
    torch.manual_seed(3)
    model, generator, losses = gpt.GPT(), torch.Generator().manual_seed(3), []
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    opt = torch.optim.AdamW([{"params": decayed}, *others], betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        starts = torch.randint(len(train_text) - gpt.CONTEXT, (RANKS * BATCH_SIZE,), generator=generator)
        x, y = gpt.windows(train_text, starts)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        for group in opt.param_groups:
            group["lr"] = gpt.schedule(step, STEPS)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """Three epochs of ten steps on two ranks, on text that neither two nor three ranks divide."""
    text = tmp_path / "text"
    text.write_bytes(b"".join(b"line %d of a text to learn by heart\n" % i for i in range(64)))
    return ["--epochs", "3", "--batch-size", "2", "--dropout", "0.1", "--every", "2", "--text", str(text)]


def start_job(*command: str) -> subprocess.Popen[str]:
    """The job once it has saved."""
    process, folder = start([sys.executable, *command], environ()), command[-1]
    while not fs.checkpoint.latest(folder) and process.poll() is None:
        time.sleep(0.01)
    return process


def outcome(process: subprocess.Popen[str]) -> str:
    try:
        output, errors = process.communicate(timeout=200)
    finally:
        end(process)
    assert process.returncode == 0, errors
    return validation_losses(output)


def validation_losses(output: str) -> str:
    """With 12 digits."""
    return next(line for line in output.splitlines() if line.startswith("validation losses:"))


def test_a_job_of_no_epochs_ends(job: list[str]) -> None:
    assert "a rank holds" in printed_by(PRODUCTION, *job, "--epochs", "0")[0]


@pytest.mark.slow
def test_a_job_that_is_told_to_end_saves_and_goes_on_as_if_undisturbed_past_a_damaged_checkpoint(
    job: list[str], tmp_path: Path
) -> None:
    whole = printed_by(PRODUCTION, *job, "--ranks", "2", "--checkpoint", str(tmp_path / "whole"))[0]
    folder = tmp_path / "resumed"
    command = [PRODUCTION, *job, "--ranks", "2", "--every", "1", "--keep", "9", "--checkpoint", str(folder)]
    process = start_job(*command)
    process.send_signal(signal.SIGTERM)
    assert outcome(process) != validation_losses(whole), "it ended early"
    *_, before, newest = sorted(path for path in folder.iterdir() if path.name[0] == "0")
    assert not fs.checkpoint.verify(newest)
    flip_a_bit(newest / "__1_0.distcp", seed=0)
    assert fs.checkpoint.latest(folder, verify=True) == before
    assert validation_losses(printed_by_a_process(*command)[0]) == validation_losses(whole)
    assert [*folder.glob(f".damaged-*-{newest.name}")], "which was set aside"


@pytest.mark.slow
def test_a_job_goes_on_with_another_number_of_ranks(job: list[str], tmp_path: Path) -> None:
    command, folder = [PRODUCTION, *job, "--dropout", "0"], ["--checkpoint", str(tmp_path / "job")]
    six = {3: ["--ranks", "3", "--batch-size", "2"], 2: ["--ranks", "2", "--batch-size", "3"]}  # the same batches
    printed_by(*command, *six[3], *folder, "--epochs", "1")
    resumed = validation_losses(printed_by(*command, *six[2], *folder)[0]).split()[2:]
    whole = validation_losses(printed_by(*command, *six[3])[0]).split()[2:]
    assert resumed[0] == whole[0]
    assert [float(x) for x in resumed] == pytest.approx([float(x) for x in whole], rel=1e-9)


@pytest.mark.slow
def test_training_stops_where_validation_gets_worse_and_keeps_the_best(tmp_path: Path) -> None:
    text, folder = tmp_path / "text", tmp_path / "job"
    text.write_bytes(bytes(range(256)) * 2 + b"what is trained on is something else, again and again. " * 66)
    options = ["--epochs", "9", "--patience", "2", "--text", str(text), "--checkpoint", str(folder)]
    losses = [float(x) for x in validation_losses(printed_by(PRODUCTION, *options, "--ranks", "2")[0]).split()[2:]]
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 9
    assert os.listdir(folder / "best") == [f"{best + 1:03d}-0000"]


@pytest.mark.slow
def test_torchrun_brings_a_killed_rank_back_from_the_newest_checkpoint(job: list[str], tmp_path: Path) -> None:
    whole = run_ranks(printed_by, RANKS, PRODUCTION, *job, "--checkpoint", str(tmp_path / "whole"))[0][0]
    folder = tmp_path / "killed"
    process = start_job(*TORCHRUN, "--max-restarts", "3", PRODUCTION, *job, "--checkpoint", str(folder))
    killed = children(process.pid)
    os.kill(killed[-1], signal.SIGKILL)
    assert outcome(process) == validation_losses(whole)
    assert len(killed) == RANKS


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in table.splitlines() if int(line.split()[1]) == pid]
