"""Programs of examples/launch as processes, and the losses that each of their ranks prints."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

import functorch_shard as fs

ROOT = Path(__file__).parents[2]
LAUNCH = "examples/launch"
PROGRAM = runpy.run_path(str(ROOT / LAUNCH / "train.py"))  # other packages call a folder of theirs examples, too
RANKS, TOLERANCE = 2, 1e-12
LINE = re.compile(rf"rank (\d+) of Mesh\(shard={RANKS}, cpu\): \[(.*?)\]")
OURS = re.compile(r"(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_\w+|(SLURM|OMPI|PMI|MV2|PET|TORCHELASTIC|SKYPILOT)_\w+)$")


def environ(**more: str) -> dict[str, str]:
    """That of a shell in which nothing was launched, with this Python and this checkout's package."""
    kept = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more


def start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """A command in the root of the checkout, at the head of a process group of its own."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def end(process: subprocess.Popen[str]) -> None:
    """End a command and what it started: torchrun ends its ranks where it is asked to end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.communicate(timeout=20)


def printed(*commands: Sequence[str], envs: Sequence[Mapping[str, str]] = (), timeout: float = 200) -> str:
    """What several commands print that run at the same time, each in its environment, and succeed."""
    pairs = zip(commands, envs or [environ()] * len(commands), strict=True)
    processes = [start(command, env) for command, env in pairs]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    except BaseException:
        for process in processes:
            end(process)
        raise
    wrong = [f"{x.args}: {errors[-4000:]}" for x, (_, errors) in zip(processes, outputs, strict=True) if x.returncode]
    assert not wrong, "\n".join(wrong)
    return "".join(output for output, _ in outputs)


def losses(output: str) -> dict[int, list[float]]:
    """The losses that each rank of a mesh of two real ranks has printed."""
    return {int(rank): [float(x) for x in numbers.split(",")] for rank, numbers in LINE.findall(output)}


@cache
def simulated(steps: int) -> list[float]:
    """Those of two simulated ranks."""
    return PROGRAM["train"](fs.simulated_mesh(RANKS), steps)


@cache
def unsharded(steps: int) -> list[float]:
    """Those of plain torch."""
    model, x, y = PROGRAM["task"]()
    opt, found = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        opt.step()
        found.append(loss.item())
    return found


def assert_trained(output: str, steps: int) -> None:
    """Each of two real ranks has the losses of two simulated ranks."""
    found = losses(output)
    assert sorted(found) == [*range(RANKS)], output
    for rank in found:
        torch.testing.assert_close(found[rank], simulated(steps), rtol=0, atol=TOLERANCE)
