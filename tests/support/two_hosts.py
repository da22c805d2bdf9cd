"""Two hosts on this machine: what runs on them has sockets to the other one, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

# Network namespaces with a name and an address each, joined by a pair of interfaces. The second one does not see the
# processes of the first either, so they share no memory. Each runs the command that follows $1, a path for files of its
# own. Nothing is left of them when their processes have ended.
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
    exec unshare --pid --fork --mount-proc "${@:2}"' - "$@" &
read -r second <"$1.made"
exec 9<"/proc/$second/ns/net" # keeps the network of the second host, and so this end of it, until both have ended
ip link add eth0 type veth peer name eth0 netns "$second"
ip address add 10.7.0.1/24 dev eth0
ip link set eth0 up
echo >"$1.joined"
"${@:2}"
wait $!
"""


def on_two_hosts(folder: Path, script: str) -> list[str]:
    """The command that runs ``script`` on ``first`` and on ``second``, as ``$number`` 0 and 1."""
    numbered = f"number=0; [ $(hostname) = first ] || number=1; {script}"
    namespaces = ["unshare", "--user", "--map-root-user", "--net", "--uts", "--mount"]
    return [*namespaces, "bash", "-c", HOSTS, "-", str(folder / "hosts"), "bash", "-c", numbered]


def why_not_two_hosts(folder: Path) -> str:
    """What this machine says to two network namespaces; nothing if it allows them."""
    tools = ["unshare", "ip", "hostname", "mount", "mkfifo"]
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    done = subprocess.run(on_two_hosts(folder, "true"), capture_output=True, text=True, timeout=60)
    return done.stderr if done.returncode else ""
