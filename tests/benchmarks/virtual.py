"""A step of virtual ranks beside one that adds up as many microbatches by ``accumulate``, in turns: time and bytes.

python -m tests.benchmarks.virtual [--ranks 2] [--virtual 8] [--steps 20]
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

import functorch_shard as fs
from tests.benchmarks.tools import command_line, in_turns, now_on_all_ranks, quartiles
from tests.benchmarks.workloads import WORKLOADS


def measure(virtual_ranks: int, steps: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Milliseconds of each step, and bytes that this rank sends in one, of both."""
    work, counter = WORKLOADS["gpt"], fs.communication.Counter()
    torch.manual_seed(0)
    model, mesh = work.model(), fs.init_mesh().with_backend(counter)
    params = fs.shard(model, fs.plan(model, mesh, virtual_ranks=virtual_ranks))
    opt = fs.optimizer(torch.optim.SGD, lr=1e-3)
    state = opt.init(params)

    def loss(params: fs.Sharded, batch: tuple[Tensor, ...]) -> Tensor:
        return work.loss(fs.bind(model, fs.gather(params))(batch[0]), batch[1])

    def virtual(params: fs.Sharded, batches: list[Any]) -> fs.Sharded:
        return opt.step(params, grads=fs.virtual.grad(loss)(params, batches), state=state)[0]

    def plain(params: fs.Sharded, batches: list[Any]) -> fs.Sharded:
        total = None
        for batch in batches:
            total = fs.accumulate(total, fs.grad(loss)(params, batch))
        assert total is not None
        return opt.step(params, grads=total, state=state)[0]

    batches = [work.batch(v, 1) for v in fs.virtual.ranks(params.layout)]
    calls = {"virtual": lambda: virtual(params, batches), "plain": lambda: plain(params, batches)}
    sent: dict[str, int] = {}
    for name, call in calls.items():
        counter.clear()
        call()
        sent[name] = sum(x.sent for x in counter.traffic.values())
    return in_turns(calls, steps, warm_up=1, now=now_on_all_ranks), sent


def main() -> None:
    args = command_line(__doc__, ranks=2, virtual=8, steps=20)
    times, sent = fs.testing.run_ranks(measure, args.ranks, args.virtual, args.steps, timeout=1800)[0]
    ratios = [a / b for a, b in zip(times["virtual"], times["plain"], strict=True)]  # of steps that are neighbours
    low, middle, high = quartiles(ratios)
    for name in times:
        print(f"{name:8} {statistics.median(times[name]):8.1f} ms, {sent[name]:,} bytes")
    print(f"ratio    {middle:8.3f}, quartiles {low:.3f} and {high:.3f}")


if __name__ == "__main__":
    main()
