"""Gloo's own reduce-scatter against messages between pairs, interleaved in one run.

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

SIZES = {"64 KB": 1 << 14, "1 MB": 1 << 18, "16 MB": 1 << 22}  # of the whole buffer, in float32
ROUNDS = 41


def on_this_rank() -> dict[str, tuple[float, float]]:
    """Median milliseconds, gloo's own and ours, of each size."""
    where = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    own, pairs = GroupBackend(*where), GlooBackend(*where)
    result = {}
    for size, numel in SIZES.items():
        whole = torch.randn(numel // where[2] * where[2])
        result[size] = medians(lambda b, x=whole: b.psum_scatter(x, 0), own, pairs)
    return result


def medians(fn: Callable[[GroupBackend], Tensor], *backends: GroupBackend) -> tuple[float, float]:
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for backend, series in zip(backends, times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            fn(backend)
            series.append(1e3 * (time.perf_counter() - start))
    own, pairs = (statistics.median(series[1:]) for series in times)
    return own, pairs


def main() -> None:
    for num_ranks in (2, 4):
        for size, (own, pairs) in run_ranks(on_this_rank, num_ranks)[0].items():
            ratio = f"{own / pairs:.2f} times as fast"
            print(f"{num_ranks} ranks, psum_scatter of {size}: gloo {own:.2f} ms, pairs {pairs:.2f} ms, {ratio}")


if __name__ == "__main__":
    main()
