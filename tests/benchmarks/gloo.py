"""Gloo's own all-gather and reduce-scatter against how this library moves bytes, interleaved in one run.

python -m tests.benchmarks.gloo
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from functorch_shard.backend import GlooBackend, GroupBackend
from functorch_shard.testing import run_ranks

SIZES = {"16 KB": 1 << 12, "256 KB": 1 << 16, "1 MB": 1 << 18, "16 MB": 1 << 22}  # of the whole buffer, in float32
ROUNDS = 41
Times = dict[str, dict[str, tuple[float, float]]]


def on_this_rank() -> Times:
    """Median milliseconds, gloo's own and ours, of each collective and size."""
    where = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    own, ours = GroupBackend(*where), GlooBackend(*where)
    result: Times = {"all_gather": {}, "psum_scatter": {}}
    for size, numel in SIZES.items():
        whole = torch.randn(numel // where[2] * where[2])
        part = whole[: len(whole) // where[2]].clone()
        result["all_gather"][size] = medians(lambda b, x=part: b.all_gather(x, 0), own, ours)
        result["psum_scatter"][size] = medians(lambda b, x=whole: b.psum_scatter(x, 0), own, ours)
    return result


def medians(fn: Callable[[GroupBackend], Tensor], *backends: GroupBackend) -> tuple[float, float]:
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for backend, series in zip(backends, times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            fn(backend)
            series.append(1e3 * (time.perf_counter() - start))
    own, ours = (statistics.median(series[1:]) for series in times)
    return own, ours


def main() -> None:
    for num_ranks in (2, 4):
        for kind, sizes in run_ranks(on_this_rank, num_ranks)[0].items():
            for size, (own, ours) in sizes.items():
                ratio = f"{own / ours:.2f} times as fast"
                print(f"{num_ranks} ranks, {kind} of {size}: gloo's own {own:.2f} ms, here {ours:.2f} ms, {ratio}")


if __name__ == "__main__":
    main()
