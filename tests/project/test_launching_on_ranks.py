"""Each file of examples/launch that needs nothing but torch trains on two ranks, with the losses of two simulated ones.

Where a file is for a system that is not here (SLURM, SkyPilot, Kubernetes), its command is run as that system would run
it, with the variables that it sets, once for each host.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.support.launching import LAUNCH, ROOT, TOLERANCE, assert_trained, environ, printed, simulated, unsharded
from tests.support.scripts import free_port
from tests.support.two_hosts import on_two_hosts, why_not_two_hosts

TWO_HOSTS = f"{LAUNCH}/torchrun_two_hosts.sh"
SRUN = """#!/usr/bin/env bash
# Starts two tasks, as srun of SLURM does on two nodes that have one task each.
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task "$@" &
done
wait -n && wait -n
"""
SCONTROL = """#!/usr/bin/env bash
[[ $* == "show hostnames first,second" ]] && printf '%s\\n' 127.0.0.1 second
"""


def text_of(name: str) -> str:
    return (ROOT / LAUNCH / name).read_text()


def test_two_simulated_ranks_have_the_losses_of_plain_torch() -> None:
    losses = simulated(10)
    assert losses[-1] < losses[0] - 0.05
    torch.testing.assert_close(losses, unsharded(10), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_torchrun_on_two_hosts_by_two_agents_of_this_one() -> None:
    commands = [["bash", TWO_HOSTS, "127.0.0.1", number, "--steps", "3"] for number in "01"]
    env = environ(RANKS="1", PORT=str(free_port()))
    assert_trained(printed(*commands, envs=[env, env]), 3)


@pytest.mark.slow
def test_torchrun_on_two_hosts_by_two_network_namespaces(tmp_path: Path) -> None:
    (tmp_path / "trial").mkdir()
    if reason := why_not_two_hosts(tmp_path / "trial"):
        pytest.skip(f"this machine does not allow two network namespaces: {reason}")
    command = on_two_hosts(tmp_path, f"exec bash {TWO_HOSTS} first $number --steps 3")
    assert_trained(printed(command, envs=[environ(RANKS="1", GLOO_SOCKET_IFNAME="eth0")]), 3)


@pytest.mark.slow
def test_the_script_of_slurm_with_an_srun_that_starts_two_tasks(tmp_path: Path) -> None:
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(free_port() - 10000), "SLURM_JOB_NODELIST": "first,second", "SLURM_NTASKS": "2"}
    env = environ(**job)
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    assert_trained(printed(["bash", f"{LAUNCH}/slurm.sbatch", "--steps", "4"], envs=[env]), 4)


@pytest.mark.slow
def test_the_command_of_skypilot_on_two_nodes() -> None:
    run = text_of("skypilot.yaml").partition("\nrun: |\n")[2]
    port = str(free_port())
    assert " 29500 " in run
    known = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
    envs = [environ(**known, SKYPILOT_NODE_RANK=str(rank)) for rank in range(2)]
    assert_trained(printed(*[["bash", "-c", run.replace("29500", port)]] * 2, envs=envs), 10)


@pytest.mark.slow
def test_the_command_of_a_trainjob_on_two_nodes() -> None:
    (line,) = re.findall(r"^    command: \[(.*)\]$", text_of("kubernetes_trainjob.yaml"), re.MULTILINE)
    command = [shlex.split(word)[0] for word in line.split(", ")]
    known = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    known["PET_MASTER_PORT"] = str(free_port())
    envs = [environ(**known, PET_NODE_RANK=str(rank)) for rank in range(2)]
    assert_trained(printed(command, command, envs=envs), 10)


def test_every_file_starts_the_program_and_names_how_it_is_started() -> None:
    files = {path.name for path in (ROOT / LAUNCH).iterdir() if path.is_file()}
    for name in files - {"train.py"}:
        text = text_of(name)
        assert "examples/launch/train.py" in text or "from train import" in text, name
        assert f"examples/launch/{name}" in text, name
    page = (ROOT / "docs/start/real_ranks.md").read_text()
    assert {name for name in files if f"examples/launch/{name}" not in page} == set()
