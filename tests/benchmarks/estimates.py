"""Estimates of a training step against gloo ranks that run it: bytes sent, and the most bytes alive.

python -m tests.benchmarks.estimates --ranks 2 4 8    # the GPT of 27 million parameters: two minutes on two cores

``plan`` is arithmetic on the layout: backward gathers all units but the last again, and there are no activations.
``trace`` is the schedule of the step as it is written. Memory is measured by what torch's allocator reports, to the
byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import torch

import functorch_shard as fs
from functorch_shard.communication import Counter, Traffic
from functorch_shard.testing import run_ranks
from tests.support.gpt_steps import gpt_of, gpt_step
from tests.support.live_bytes import LiveBytes

STEPS = 2  # before the one that is measured: they make what others use again


@dataclass(frozen=True)
class Step:
    """What a rank sends for its units in a step, and the most bytes alive in it."""

    traffic: Mapping[tuple[str, str], Traffic]
    peak: int

    @property
    def sent(self) -> int:
        return sum(one.sent for one in self.traffic.values())


def measured(axes: dict[str, int], depth: int) -> tuple[Step, Step]:
    """On this rank, and traced."""
    torch.set_num_threads(1)
    mesh, model, counter = fs.init_mesh(axes), gpt_of(depth), Counter()
    with LiveBytes() as live:
        step, (params, state, *batch) = gpt_step(mesh, model, mesh.rank)
        for _ in range(STEPS):
            params, state, _ = step(params, state, *batch)
        counted = params.layout.on(mesh.with_backend(counter))
        params, state = fs.Sharded(params, counted), {k: fs.Sharded(v, counted) for k, v in state.items()}
        live.mark("step")
        step(params, state, *batch)
        live.mark("end")
    traffic = {key: Traffic(one.number, one.nbytes, one.sent) for key, one in counter.traffic.items()}
    schedule = fs.compile(step).trace(params, state, *batch)
    traced = Step(schedule.traffic(mesh.axes), schedule.inputs + schedule.peak)
    return Step(traffic, live.peak("step", "end")), traced


def planned(axes: dict[str, int], depth: int) -> fs.Estimate:
    with torch.device("meta"):
        model = gpt_of(depth)
    return fs.estimate(fs.plan(model, fs.simulated_mesh(axes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--depth", type=int, default=8, help="blocks")
    chosen = parser.parse_args()
    print("ranks   MiB sent: counted    trace     plan    peak MiB: measured    trace")
    for ranks in chosen.ranks:
        axes = {"shard": ranks}
        found = run_ranks(measured, ranks, axes, chosen.depth, timeout=300)
        assert all(one.traffic == traced.traffic for one, traced in found)
        sent = [n / 2**20 for n in (found[0][0].sent, found[0][1].sent, planned(axes, chosen.depth).sent)]
        peaks = [n / 2**20 for n in (max(one.peak for one, _ in found), found[0][1].peak)]
        ratios = f"plan {sent[2] / sent[0]:.2f}, peak {peaks[1] / peaks[0]:.2f}"
        print(
            f"{ranks:5d} {sent[0]:19.3f} {sent[1]:8.3f} {sent[2]:8.3f} {peaks[0]:21.1f} {peaks[1]:8.1f}   {ratios}",
            flush=True,
        )


if __name__ == "__main__":
    main()
