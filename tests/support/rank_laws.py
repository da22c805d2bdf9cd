"""What holds on two real ranks, on gloo or NCCL.

``torchrun --nproc-per-node 2 -m tests.support.rank_laws gradients cuda`` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.laws.tasks import ON_RANK, Data, on_mesh
from tests.support.device_laws import ADAMW, BATCH, WIDTH, gradients_and_loss, on_cpu, stack_of_layers
from tests.support.scripts import free_port

tree_map: Any = optree.tree_map
ROOT = Path(__file__).parents[2]
Span = tuple[float, float]


def gradients(mesh: fs.Mesh) -> None:
    """Each rank has the row of the same simulated rank."""
    data, tasks = Data(mesh.size), list(ON_RANK)
    rows = on_mesh(fs.simulated_mesh(mesh.size, device="cpu"), data, tasks)
    for task, mine in on_mesh(mesh, data, tasks).items():
        expected = tree_map(lambda x: x[mesh.rank], rows[task])
        assert_trees_close({task: _plain(on_cpu(mine))}, {task: _plain(expected)}, rtol=1e-9, atol=1e-11)


def _plain(tree: Any) -> Any:
    return dict(tree) if isinstance(tree, fs.Sharded) else tree


def trained(mesh: fs.Mesh, put: Callable[[fs.Sharded], fs.Sharded]) -> dict[str, Tensor]:
    """Parameters after some steps with all that meets a collective on the way, each rank with its own samples."""
    model, scaling = stack_of_layers().to(mesh.device), fs.LossScale.dynamic(initial=8.0)
    params = put(fs.shard(model, fs.plan(model, mesh)))
    state, scale = ADAMW.init(params), scaling.init(params)
    for i in range(5):
        x = torch.randn(2 * BATCH, WIDTH, generator=torch.Generator().manual_seed(i)).to(mesh.device)
        grads, _ = gradients_and_loss(model, params, mesh.split(x))
        grads = tree_map(lambda x: x * 8.0, grads)
        grads, finite = scaling.unscale(grads, scale)
        grads, _ = fs.clip_by_global_norm(grads, 0.1)
        new = ADAMW.step(params, grads=grads, state=state)
        params, state = scaling.select(finite, new, (params, state))
        scale = scaling.update(scale, finite)
    return on_cpu(dict(fs.gather(params, lazy=False)))


def training(mesh: fs.Mesh) -> None:
    """The same parameters as one rank that has all samples, wherever the shards are."""
    alone = fs.Mesh(tuple(fs.simulated_mesh(1, device="cpu")), torch.device("cpu"))
    expected = trained_alone(alone)
    for put in (lambda params: params, lambda params: fs.offload(params, "cpu")):
        assert_trees_close(trained(mesh, put), expected, rtol=1e-4, atol=1e-4)


def trained_alone(mesh: fs.Mesh) -> dict[str, Tensor]:
    """By torch, without shards."""
    model = stack_of_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for i in range(5):
        x = torch.randn(2 * BATCH, WIDTH, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return {name: x.detach() for name, x in model.named_parameters()}


def compiling(mesh: fs.Mesh) -> None:
    """Recorded steps train as eager ones."""
    eager = trained_by(mesh, lambda step: step)
    for backend in BACKENDS[mesh.device.type]:
        compiled = trained_by(mesh, lambda step, backend=backend: fs.compile(step, backend=backend))
        assert_trees_close(compiled, eager, rtol=1e-4, atol=1e-4)


BACKENDS = {"cpu": ["replay"], "cuda": ["replay", "cudagraphs", "inductor"]}


def trained_by(mesh: fs.Mesh, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[str, Tensor]:
    """Parameters after some steps of what ``make`` makes of the eager step."""
    model = stack_of_layers().to(mesh.device)
    params = fs.shard(model, fs.plan(model, mesh))

    def step(params: fs.Sharded, state: Any, x: Tensor) -> Any:
        grads, _ = gradients_and_loss(model, params, x)
        return ADAMW.step(params, grads=fs.clip_by_global_norm(grads, 0.1)[0], state=state)

    state, run = ADAMW.init(params), make(step)
    for i in range(4):
        x = torch.randn(2 * BATCH, WIDTH, generator=torch.Generator().manual_seed(i)).to(mesh.device)
        params, state = tree_map(torch.clone, run(params, state, mesh.split(x)))  # CUDA graphs write to one place
    return on_cpu(dict(fs.gather(params, lazy=False)))


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
    gathers, kernels = spans_of(profile.events())
    assert len(gathers) == 8, f"expected 8 gathers, got {len(gathers)}"
    shared = num_overlapping(gathers, kernels)
    assert shared >= 6, f"of 8 gathers {shared} overlap with a kernel of the model"


def spans_of(events: Any) -> tuple[list[Span], list[Span]]:
    """When all-gathers ran on the device, and when kernels of the model did."""
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    named = [(e.name.lower(), _span(e)) for e in on_device]
    gathers = [span for name, span in named if name.startswith("nccl") and "kernel" in name and "allgather" in name]
    return gathers, [span for name, span in named if any(word in name for word in ("gemm", "cutlass", "nvjet", "tanh"))]


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def num_overlapping(spans: Sequence[Span], others: Sequence[Span]) -> int:
    """How many of ``spans`` share time with one of ``others``."""
    return sum(any(start < end and begin < stop for start, stop in others) for begin, end in spans)


TASKS = {"gradients": gradients, "training": training, "compiling": compiling, "overlap": overlap}


def run(task: str, kind: str) -> None:
    """``task`` on two ranks that torchrun starts; raise with what they printed unless both end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    command += [f"--master-port={free_port()}", "-m", "tests.support.rank_laws", task, kind]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if kind == "cpu":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


def main(task: str, kind: str) -> None:
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    TASKS[task](fs.init_mesh(device=kind))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
