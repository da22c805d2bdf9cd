"""The time of a step of Muon by owners, beside the same step with every rank doing all of the work.

``python -m tests.benchmarks.whole`` updates the matrices of a GPT's blocks on 1, 2 and 4 gloo ranks and prints a line
for each: seconds of a step and processor seconds of a rank, for both ways, in turns; what each rank sends; and how far
the results are apart. Every rank computes with one thread, so more ranks than cores cannot be faster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication import Counter
from functorch_shard.testing import run_ranks
from tests.benchmarks.tools import command_line, in_turns, now_on_all_ranks

MUON: dict[str, Any] = {"lr": 0.02}
Step = Callable[[fs.Sharded, fs.Sharded], fs.Sharded]


def matrices(width: int, layers: int, seed: int = 0) -> dict[str, Tensor]:
    shapes = {"qkv": (3 * width, width), "proj": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    generator = torch.Generator().manual_seed(seed)
    names = [f"blocks.{i}.{name}" for i in range(layers) for name in shapes]
    return {name: torch.randn(shapes[name.rpartition(".")[2]], generator=generator) for name in names}


def by_every_rank(params: fs.Sharded) -> Step:
    """Gather parameters and gradients, update all matrices on every rank, keep this rank's part."""
    own = {name: torch.nn.Parameter(x.clone()) for name, x in fs.gather(params, lazy=False).items()}
    muon = torch.optim.Muon(own.values(), **MUON)

    def step(params: fs.Sharded, grads: fs.Sharded) -> fs.Sharded:
        whole = fs.gather(params, lazy=False)
        for name, grad in fs.gather(grads, lazy=False).items():
            own[name].data.copy_(whole[name])
            own[name].grad = grad
        muon.step()
        return fs.shard({name: x.detach() for name, x in own.items()}, params.layout)

    return step


def by_owners(params: fs.Sharded) -> Step:
    opt = fs.optimizer(torch.optim.Muon, whole=True, **MUON)
    state = opt.init(params)

    def step(params: fs.Sharded, grads: fs.Sharded) -> fs.Sharded:
        nonlocal state
        params, state = opt.step(params, grads=grads, state=state, donate=True)
        return params

    return step


CONTENDERS: dict[str, Callable[[fs.Sharded], Step]] = {"owners": by_owners, "every rank": by_every_rank}


def measured(width: int, layers: int, rounds: int) -> tuple[dict[str, dict[str, float]], float]:
    """Of each contender on this rank; and how far their results are apart."""
    torch.set_num_threads(1)
    counter = Counter()
    mesh, source = fs.init_mesh().with_backend(counter), matrices(width, layers)
    layout = fs.plan(source, mesh)
    trees = {name: fs.shard(source, layout) for name in CONTENDERS}
    grads = fs.shard(matrices(width, layers, seed=1), layout)
    steps = {name: make(trees[name]) for name, make in CONTENDERS.items()}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    rows: dict[str, dict[str, float]] = {}

    def call(name: str) -> None:
        start = time.process_time()
        trees[name] = steps[name](trees[name], grads)
        processor[name].append(time.process_time() - start)

    for name in steps:
        counter.clear()
        call(name)
        traffic = counter.traffic.values()
        rows[name] = {"collectives": sum(t.number for t in traffic), "sent": sum(t.sent for t in traffic)}
    times = in_turns({name: partial(call, name) for name in steps}, rounds, now=now_on_all_ranks)
    one, two = (fs.gather(tree, lazy=False) for tree in trees.values())
    apart = max((one[name] - two[name]).abs().max().item() for name in one)
    for name in steps:
        rows[name] |= {"seconds": median(times[name]) / 1e3, "processor": median(processor[name][1:])}
    return rows, apart


def main() -> None:
    args = command_line(__doc__, ranks=[1, 2, 4], width=512, layers=4, rounds=5)
    numel = sum(x.numel() for x in matrices(args.width, args.layers).values())
    print(f"Muon, {4 * args.layers} matrices, {numel:,} float32, {os.cpu_count()} cores, one thread a rank")
    print("ranks  by           seconds  processor  collectives    MB sent  difference")
    for ranks in args.ranks:
        found = run_ranks(measured, ranks, args.width, args.layers, args.rounds)
        apart = max(each for _, each in found)
        for name in CONTENDERS:
            slowest = {key: max(rows[name][key] for rows, _ in found) for key in found[0][0][name]}
            numbers = f"{slowest['seconds']:9.3f} {slowest['processor']:10.3f} {slowest['collectives']:12.0f}"
            print(f"{ranks:5d}  {name:10s} {numbers} {slowest['sent'] / 2**20:10.1f}  {apart:10.1e}", flush=True)


if __name__ == "__main__":
    main()
