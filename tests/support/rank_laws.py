"""What holds on two real ranks, on gloo or NCCL.

``torchrun --nproc-per-node 2 -m tests.support.rank_laws cuda`` runs it.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import optree
import torch
import torch.distributed as dist

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.device.programs import NOT_IN_A_BATCH, PROGRAMS, tolerance, train
from tests.support.launching import environ, printed
from tests.support.scripts import free_port

tree_map: Any = optree.tree_map


def programs(mesh: fs.Mesh) -> None:
    """Each program of devices, with all derivatives of the laws: this rank has the row of the same simulated rank."""
    compiled = {"train by a compiler": partial(train, backend="inductor")} if mesh.device.type == "cuda" else {}
    for name, program in {**PROGRAMS, **compiled}.items():
        if name in NOT_IN_A_BATCH:
            continue
        rows = PROGRAMS.get(name, train)(fs.simulated_mesh(dict(mesh.axes), device="cpu"))
        expected = tree_map(lambda x: x[mesh.rank], rows)
        assert_trees_close({name: program(mesh)}, {name: expected}, **tolerance(name, mesh.device))


def run(kind: str) -> None:
    """The programs on two ranks that torchrun starts; raise with what they printed unless both end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    command += [f"--master-port={free_port()}", "-m", "tests.support.rank_laws", kind]
    env = environ()
    if kind == "cuda":
        del env["GLOO_SOCKET_IFNAME"]
    printed(command, envs=[env], timeout=600)


def main(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    programs(fs.init_mesh(device=kind))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
