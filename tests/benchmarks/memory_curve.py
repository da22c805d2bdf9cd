"""Bytes of tensors over a training step, beside FSDP2: two gloo ranks, one model, every allocation and free counted.

python -m tests.benchmarks.memory_curve --json docs/_static/memory.json && python docs/pictures.py

Both send over sockets, as ranks of different hosts do, so that what is received is counted for both. The first steps
are left out: optimizers make their state in them.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from functorch_shard.gloo.backend import GlooBackend
from functorch_shard.testing import run_ranks
from tests.benchmarks.contenders import fsdp2, ours
from tests.benchmarks.tools import command_line
from tests.benchmarks.workloads import WORKLOADS
from tests.support.live_bytes import LiveBytes

Curves = dict[str, list[float]]
PHASES = ("forward", "backward", "update")
RANKS, BATCH, STEPS, POINTS = 2, 4, 5, 120


CONTENDERS = {"functorch_shard": partial(ours, reshard=True), "FSDP2": partial(fsdp2, reshard=True)}


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
    work, i, marked = WORKLOADS["gpt"], 0, set[str]()

    def mark(phase: str) -> None:
        """Once in a step."""
        if (text := f"{phase} {i}") not in marked:
            marked.add(text)
            live.mark(text)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        value = work.loss(out, y)
        mark("backward")
        return value

    with LiveBytes() as live:
        register_optimizer_step_pre_hook(lambda *_: mark("update"))
        step = CONTENDERS[name](replace(work, loss=loss), False, torch.device("cpu"))
        x, y = work.batch(dist.get_rank(), BATCH)
        for i in range(STEPS):  # noqa: B007  (mark reads it)
            mark("forward")
            step(x, y)
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
    path = command_line(__doc__, json=None).json
    curves = {name: run_ranks(curves_on_this_rank, RANKS, name)[0] for name in CONTENDERS}
    for name, phases in curves.items():
        print(f"{name}: peak {max(map(max, phases.values())):.1f} MiB,", {k: max(v) for k, v in phases.items()})
    if path:
        Path(path).write_text(json.dumps({"torch": torch.__version__, "MiB": curves}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
