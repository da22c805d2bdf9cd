"""Bytes of tensors over a training step, beside FSDP2: two gloo ranks, one model, every allocation and free counted.

python -m tests.benchmarks.memory_curve --json docs/_static/memory.json && python docs/pictures.py

Both send over sockets, as ranks of different hosts do, so that what is received is counted for both. The first steps
are left out: optimizers make their state in them.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.gloo.backend import GlooBackend
from functorch_shard.testing import run_ranks
from tests.benchmarks.workloads import WORKLOADS, Workload
from tests.support.live_bytes import LiveBytes

Step = Callable[[str], None]  # marks each of its phases with the name
Curves = dict[str, list[float]]
PHASES = ("forward", "backward", "update")
RANKS, BATCH, STEPS, POINTS = 2, 4, 5, 120


def ours(work: Workload, live: LiveBytes) -> Step:
    mesh, model = fs.init_mesh(), work.model()
    params, opt = fs.shard(model, fs.plan(model, mesh)), fs.optimizer(torch.optim.AdamW, lr=1e-3)
    model.to("meta")  # the shards are all that is needed
    state, (x, y) = opt.init(params), work.batch(mesh.rank, BATCH)

    def loss_fn(params: fs.Sharded, name: str) -> Tensor:
        live.mark(f"forward {name}")
        loss = work.loss(functional_call(model, fs.gather(params), (x,)), y)
        live.mark(f"backward {name}")
        return loss

    def step(name: str) -> None:
        nonlocal params, state
        grads = fs.grad(loss_fn)(params, name)
        live.mark(f"update {name}")
        params, state = opt.step(params, grads=grads, state=state, donate=True)

    return step


def fsdp2(work: Workload, live: LiveBytes) -> Step:
    model: Any = work.model()
    for block in (*model.blocks, model):
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (RANKS,)))
    optimizer, (x, y) = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), work.batch(dist.get_rank(), BATCH)

    def step(name: str) -> None:
        live.mark(f"forward {name}")
        loss = work.loss(model(x), y)
        live.mark(f"backward {name}")
        loss.backward()
        live.mark(f"update {name}")
        optimizer.step()
        optimizer.zero_grad()

    return step


CONTENDERS = {"functorch_shard": ours, "FSDP2": fsdp2}


def frees_here() -> None:
    """From now on collectives of torch end a moment after they are done, when gloo's threads hold nothing: what they
    free is not reported."""
    for name in ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, _ended(getattr(dist, name)))


def _ended(collective: Callable[..., Any]) -> Callable[..., None]:
    def until_it_ended(*args: Any, async_op: bool = False, **options: Any) -> None:
        work = collective(*args, **options, async_op=True)
        work.wait()
        time.sleep(0.02)
        del work

    return until_it_ended


def curves_on_this_rank(name: str) -> Curves:
    """MiB after each allocation and free of the last step, by phase."""
    gc.disable()
    GlooBackend._memory = None  # by sockets
    torch.manual_seed(0)
    if name == "FSDP2":
        dist.barrier()
        frees_here()
    with LiveBytes() as live:
        step = CONTENDERS[name](WORKLOADS["gpt"], live)
        for i in range(STEPS):
            step(str(i))
        live.mark("end")
    starts = [live.at(f"forward {i}") for i in range(STEPS)]
    if len({*starts[2:], live.at("end")}) > 1:
        raise AssertionError(f"{name}: steps begin with {starts} bytes, expected equal ones: some were not reported")
    last = [f"{phase} {STEPS - 1}" for phase in PHASES] + ["end"]
    return {phase: thinned(live.curve(*last[i : i + 2])) for i, phase in enumerate(PHASES)}


def thinned(values: Sequence[int]) -> list[float]:
    """The largest of each of ``POINTS`` equal parts, in MiB."""
    edges = [len(values) * i // POINTS for i in range(POINTS + 1)]
    return [round(max(values[a : max(b, a + 1)]) / 2**20, 1) for a, b in pairwise(edges)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the curves to this file")
    path = parser.parse_args().json
    curves = {name: run_ranks(curves_on_this_rank, RANKS, name)[0] for name in CONTENDERS}
    for name, phases in curves.items():
        print(f"{name}: peak {max(map(max, phases.values())):.1f} MiB,", {k: max(v) for k, v in phases.items()})
    if path:
        path.write_text(json.dumps({"torch": torch.__version__, "MiB": curves}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
