"""The time of a step of Muon by owners, beside the same step with every rank doing all of the work.

``python -m tests.benchmarks.whole`` updates the matrices of a GPT's blocks on 1, 2 and 4 gloo ranks and prints a line
for each: seconds of a step and processor seconds of a rank, for both ways, in turns; what each rank sends; and how far
the results are apart. Every rank computes with one thread, so more ranks than cores cannot be faster.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication import Counter
from functorch_shard.testing import run_ranks

MUON: dict[str, Any] = {"lr": 0.02}


def matrices(width: int, layers: int, seed: int = 0) -> dict[str, Tensor]:
    shapes = {"qkv": (3 * width, width), "proj": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    generator = torch.Generator().manual_seed(seed)
    names = [f"blocks.{i}.{name}" for i in range(layers) for name in shapes]
    return {name: torch.randn(shapes[name.rpartition(".")[2]], generator=generator) for name in names}


class EveryRankAll:
    """Gather parameters and gradients, update all matrices on every rank, keep this rank's part."""

    def __init__(self, params: fs.Sharded) -> None:
        self.params = {name: torch.nn.Parameter(x.clone()) for name, x in fs.gather(params, lazy=False).items()}
        self.muon = torch.optim.Muon(self.params.values(), **MUON)

    def __call__(self, params: fs.Sharded, grads: fs.Sharded) -> fs.Sharded:
        whole = fs.gather(params, lazy=False)
        for name, grad in fs.gather(grads, lazy=False).items():
            self.params[name].data.copy_(whole[name])
            self.params[name].grad = grad
        self.muon.step()
        return fs.shard({name: x.detach() for name, x in self.params.items()}, params.layout)


class ByOwners:
    def __init__(self, params: fs.Sharded) -> None:
        self.opt = fs.optimizer(torch.optim.Muon, whole=True, **MUON)
        self.state = self.opt.init(params)

    def __call__(self, params: fs.Sharded, grads: fs.Sharded) -> fs.Sharded:
        params, self.state = self.opt.step(params, grads=grads, state=self.state, donate=True)
        return params


def timed(step: Callable[[], Any], mesh: fs.Mesh) -> tuple[float, float]:
    fs.collectives.psum(torch.ones(()), mesh)  # all ranks begin together
    start, cpu = time.perf_counter(), time.process_time()
    step()
    used = time.process_time() - cpu
    fs.collectives.psum(torch.ones(()), mesh)
    return time.perf_counter() - start, used


def measured(width: int, layers: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    counter = Counter()
    mesh = fs.init_mesh().with_backend(counter)
    source = matrices(width, layers)
    layout = fs.plan(source, mesh)
    owners, everybody = fs.shard(source, layout), fs.shard(source, layout)
    grads = fs.shard(matrices(width, layers, seed=1), layout)
    steps = {"owners": ByOwners(owners), "every rank": EveryRankAll(everybody)}
    trees, sent, times = {"owners": owners, "every rank": everybody}, {}, {name: list[Any]() for name in steps}
    for i in range(rounds + 1):
        for name, step in steps.items():
            counter.clear()

            def run(name: str = name, step: Any = step) -> None:
                trees[name] = step(trees[name], grads)

            result = timed(run, mesh)
            times[name] += [result] if i else []
            seen = [t for (_, kind), t in counter.traffic.items() if kind != "psum"]
            sent[name] = (sum(t.number for t in seen), sum(t.sent for t in seen))
    one, two = (fs.gather(tree, lazy=False) for tree in trees.values())
    apart = max((one[name] - two[name]).abs().max().item() for name in one)
    seconds = {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    return {"seconds": seconds, "sent": sent, "apart": apart}


def row(ranks: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks: the time of the slowest, the most processor time."""
    first: dict[str, Any] = {"ranks": ranks, "apart": max(each["apart"] for each in results)}
    for name in ("owners", "every rank"):
        first[name] = {
            "seconds": max(each["seconds"][name][0] for each in results),
            "processor": max(each["seconds"][name][1] for each in results),
            "collectives": results[0]["sent"][name][0],
            "sent": results[0]["sent"][name][1],
        }
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a step of Muon by owners, and by every rank.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    numel = sum(x.numel() for x in matrices(args.width, args.layers).values())
    print(f"Muon, {4 * args.layers} matrices, {numel:,} float32, {os.cpu_count()} cores, one thread a rank")
    print("ranks  by           seconds  processor  collectives    MB sent  difference")
    rows = []
    for ranks in args.ranks:
        rows.append(row(ranks, run_ranks(measured, ranks, args.width, args.layers, args.rounds)))
        for name in ("owners", "every rank"):
            each = rows[-1][name]
            numbers = f"{each['seconds']:9.3f} {each['processor']:10.3f} {each['collectives']:12d}"
            print(
                f"{ranks:5d}  {name:10s} {numbers} {each['sent'] / 2**20:10.1f}  {rows[-1]['apart']:10.1e}", flush=True
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
