"""What holds on two real ranks, on gloo or NCCL.

``torchrun --nproc-per-node 2 -m tests.support.rank_laws programs cuda`` runs it.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

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


# a profile


def overlap(mesh: fs.Mesh) -> None:
    """While a unit is computed with, the next one is under way: most gathers share time with a kernel of the model."""
    width, batch = 4096, 8192
    with torch.device(mesh.device):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)))
        x = torch.randn(batch, width)
    params = fs.shard(model, fs.plan(model, mesh))

    @torch.no_grad()
    def forward() -> None:
        functional_call(model, fs.gather(params), (x,)).sum()

    for _ in range(3):
        forward()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        forward()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    named = [(e.name.lower(), (e.time_range.start, e.time_range.end)) for e in on_device]
    gathers = [span for name, span in named if name.startswith("nccl") and "kernel" in name and "allgather" in name]
    kernels = [span for name, span in named if any(word in name for word in ("gemm", "cutlass", "nvjet", "tanh"))]
    assert len(gathers) == 8, f"expected 8 gathers, got {len(gathers)}"
    shared = sum(any(start < end and begin < stop for start, stop in kernels) for begin, end in gathers)
    assert shared >= 6, f"of 8 gathers {shared} overlap with a kernel of the model"


TASKS = {"programs": programs, "overlap": overlap}


def run(task: str, kind: str) -> None:
    """``task`` on two ranks that torchrun starts; raise with what they printed unless both end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    command += [f"--master-port={free_port()}", "-m", "tests.support.rank_laws", task, kind]
    env = environ()
    if kind == "cuda":
        del env["GLOO_SOCKET_IFNAME"]
    printed(command, envs=[env], timeout=600)


def main(task: str, kind: str) -> None:
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    TASKS[task](fs.init_mesh(device=kind))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
