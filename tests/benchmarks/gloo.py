"""How gloo ranks of one host can move bytes, each way at each size, interleaved in one run.

python -m tests.benchmarks.gloo

"gloo's own" are its all-gather and reduce-scatter; the rest is what this library chooses from: sockets between hosts,
shared memory on one host, and of gathers whose results are freed soon, one memory of all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from functorch_shard.communication.backend import Axis
from functorch_shard.communication.process_group import GroupBackend
from functorch_shard.gloo.backend import GlooBackend
from functorch_shard.testing import run_ranks

SIZES = {  # of the whole buffer, in float32
    "64 KB": 1 << 14,
    "256 KB": 1 << 16,
    "1 MB": 1 << 18,
    "4 MB": 1 << 20,
    "16 MB": 1 << 22,
}
ROUNDS = 41
Call = Callable[[Axis, bool], Tensor]


@dataclass(frozen=True)
class Way:
    """A backend, and whether it may send large messages through shared memory."""

    axis: Axis
    by_memory: bool = False
    transient: bool = False

    def time(self, call: Call) -> tuple[float, float]:
        """Milliseconds, and milliseconds of this rank's processor."""
        with nullcontext() if self.by_memory else patch.object(GlooBackend, "_memory", None):
            dist.barrier()
            start, work = time.perf_counter(), time.process_time()
            call(self.axis, self.transient)
            return 1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - work)


def on_this_rank() -> list[str]:
    where = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    own, ours = (Axis("shard", where[2], kind(*where)) for kind in (GroupBackend, GlooBackend))
    every = {
        "gloo's own": Way(own),
        "sockets": Way(ours),
        "shared memory": Way(ours, by_memory=True),
        "one memory": Way(ours, by_memory=True, transient=True),
    }
    lines = []
    for size, numel in SIZES.items():
        whole = torch.randn(numel // where[2] * where[2])
        part = whole[: len(whole) // where[2]].clone()
        for kind, x in (("all_gather", part), ("psum_scatter", whole)):
            ways = {name: way for name, way in every.items() if kind == "all_gather" or not way.transient}
            times = medians(lambda axis, r, kind=kind, x=x: axis.issue(kind, x, transient=r).wait(), ways)
            lines.append(f"{where[2]} ranks, {kind} of {size}: {times}")
    return sorted(lines, key=lambda line: "psum" in line)


def medians(call: Call, ways: dict[str, Way]) -> str:
    rounds = [{name: way.time(call) for name, way in ways.items()} for _ in range(ROUNDS)][1:]
    columns = {name: zip(*(times[name] for times in rounds), strict=True) for name in ways}
    return ", ".join("{} {:.2f} ({:.2f})".format(name, *map(statistics.median, pair)) for name, pair in columns.items())


def main() -> None:
    print("median ms (median ms of a rank's processor)")
    for num_ranks in (2, 4):
        print("\n".join(run_ranks(on_this_rank, num_ranks, timeout=600)[0]), flush=True)


if __name__ == "__main__":
    main()
