"""Each file of examples/launch that needs nothing but torch trains on two ranks, with the losses of two simulated ones.

Where a file is for a system that is not here (SLURM, SkyPilot, Kubernetes), its command is run as that system would run
it, with the variables that it sets, once for each host.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.launching import LAUNCH, ROOT, TOLERANCE, assert_trained, environ, printed, simulated, unsharded
from tests.support.scripts import free_port

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
# Two hosts: network namespaces with a name and an address each, joined by a pair of interfaces. Each runs the command
# that follows $1, a path for files of its own. Nothing is left of them when their processes have ended.
HOSTS = """set -eu
printf '127.0.0.1 localhost\n10.7.0.1 first\n10.7.0.2 second\n' >"$1"
mount --bind "$1" /etc/hosts
hostname first
ip link set lo up
mkfifo "$1.made" "$1.joined"
unshare --net --uts bash -euc '
    hostname second
    ip link set lo up
    echo $$ >"$1.made"
    read -r _ <"$1.joined"
    ip address add 10.7.0.2/24 dev eth0
    ip link set eth0 up
    exec "${@:2}"' - "$@" &
read -r second <"$1.made"
exec 9<"/proc/$second/ns/net" # keeps the network of the second host, and so this end of it, until both have ended
ip link add eth0 type veth peer name eth0 netns "$second"
ip address add 10.7.0.1/24 dev eth0
ip link set eth0 up
echo >"$1.joined"
"${@:2}"
wait $!
"""


def text_of(name: str) -> str:
    return (ROOT / LAUNCH / name).read_text()


def test_two_simulated_ranks_have_the_losses_of_plain_torch() -> None:
    losses = simulated(10)
    assert losses[-1] < losses[0] - 0.05
    torch.testing.assert_close(losses, unsharded(10), rtol=0, atol=TOLERANCE)


def test_torchrun_on_two_hosts_by_two_agents_of_this_one() -> None:
    commands = [["bash", TWO_HOSTS, "127.0.0.1", number, "--steps", "3"] for number in "01"]
    env = environ(RANKS="1", PORT=str(free_port()))
    assert_trained(printed(*commands, envs=[env, env]), 3)


def namespaces() -> list[str]:
    """The command that runs a script in a network namespace, with names and mounts of its own."""
    return ["unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "bash", "-c", HOSTS, "-"]


def why_not_two_hosts(folder: Path) -> str:
    """What this machine says to two network namespaces; nothing if it allows them."""
    tools = ["unshare", "ip", "hostname", "mount", "mkfifo"]
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    done = subprocess.run([*namespaces(), str(folder / "hosts"), "true"], capture_output=True, text=True, timeout=60)
    return done.stderr if done.returncode else ""


@pytest.mark.slow
def test_torchrun_on_two_hosts_by_two_network_namespaces(tmp_path: Path) -> None:
    (tmp_path / "trial").mkdir()
    if reason := why_not_two_hosts(tmp_path / "trial"):
        pytest.skip(f"this machine does not allow two network namespaces: {reason}")
    script = f"number=0; [ $(hostname) = first ] || number=1; exec bash {TWO_HOSTS} first $number --steps 3"
    command = [*namespaces(), str(tmp_path / "hosts"), "bash", "-c", script]
    assert_trained(printed(command, envs=[environ(RANKS="1", GLOO_SOCKET_IFNAME="eth0")]), 3)


def test_the_script_of_slurm_with_an_srun_that_starts_two_tasks(tmp_path: Path) -> None:
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(free_port() - 10000), "SLURM_JOB_NODELIST": "first,second", "SLURM_NTASKS": "2"}
    env = environ(**job)
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    assert_trained(printed(["bash", f"{LAUNCH}/slurm.sbatch", "--steps", "4"], envs=[env]), 4)


def test_the_script_of_slurm_asks_for_a_task_for_each_gpu() -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text_of("slurm.sbatch"), re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert int(options["nodes"]) == 2


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


@pytest.mark.parametrize("name", ["torchrun_two_hosts.sh", "slurm.sbatch"])
def test_a_script_is_one_of_bash(name: str) -> None:
    subprocess.run(["bash", "-n", f"{LAUNCH}/{name}"], cwd=ROOT, check=True, timeout=60)


def test_every_file_starts_the_program_and_names_how_it_is_started() -> None:
    files = {path.name for path in (ROOT / LAUNCH).iterdir() if path.is_file()}
    for name in files - {"train.py"}:
        text = text_of(name)
        assert "examples/launch/train.py" in text or "from train import" in text, name
        assert f"examples/launch/{name}" in text, name
    page = (ROOT / "docs/start/real_ranks.md").read_text()
    assert {name for name in files if f"examples/launch/{name}" not in page} == set()
