"""The host time of a step: what Python costs beside the plain step, with a process group that sends nothing.

python -m tests.benchmarks.dispatch --rounds 30    # 24 blocks of width 32 on one of 8 ranks: half a minute

Nothing is sent and arithmetic is tiny, so what is left is the interpreter: on a GPU it decides whether small steps are
bound by the host. Values are meaningless, since the fake group copies nothing.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import functorch_shard as fs
from tests.benchmarks.contenders import alone, fsdp2, ours
from tests.benchmarks.tools import command_line, in_turns
from tests.benchmarks.workloads import GPT, Block, Workload

SAMPLES, LENGTH, WIDTH = 2, 8, 32
NARROW = replace(GPT, width=WIDTH, heads=4, groups=4, hidden=4 * WIDTH)


class Blocks(nn.Module):
    """Blocks of a transformer, and nothing else."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(NARROW) for _ in range(number)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def mesh() -> fs.Mesh:
    return fs.Mesh.from_device_mesh(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)))


CONTENDERS = {
    "plain": alone,
    "ours": partial(ours, reshard=True, units="blocks", on=mesh),
    "replay": partial(ours, reshard=True, units="blocks", on=mesh, compiled="replay"),
    "FSDP2": partial(fsdp2, reshard=True),
}


def main() -> None:
    chosen = command_line(__doc__, ranks=8, blocks=24, rounds=30)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=chosen.ranks)
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    work = Workload(lambda: Blocks(chosen.blocks), lambda rank, size: (x, x), lambda out, y: out.square().mean())
    made = {name: make(work, False, torch.device("cpu")) for name, make in CONTENDERS.items()}
    steps = {name: partial(step, x, x) for name, step in made.items()}
    medians = {name: statistics.median(times) for name, times in in_turns(steps, chosen.rounds, warm_up=3).items()}
    print(f"{chosen.blocks} blocks of width {WIDTH}, one of {chosen.ranks} ranks, nothing is sent: median ms of a step")
    for name, median in medians.items():
        above = (median - medians["plain"]) / (medians["FSDP2"] - medians["plain"])
        print(f"  {name:8s} {median:8.2f}  above the plain step, in terms of FSDP2: {above:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
