"""A step on simulated ranks, as written and recorded, beside the same step without shards: a loop over ranks' batches.

python -m tests.benchmarks.simulated                                 # 4 simulated ranks, three models: two minutes
python -m tests.benchmarks.simulated --ranks 8 --models MLP --backends replay inductor

Every contender takes the same samples and the same optimizer class.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_shard as fs
from tests.benchmarks.contenders import training_step
from tests.benchmarks.tools import command_line, in_turns, milliseconds
from tests.benchmarks.workloads import WORKLOADS, Workload

Step = Callable[[], Tensor]
LOOP = "loop over batches"


class Words(nn.Module):
    """Two blocks of the benchmark's GPT."""

    def __init__(self) -> None:
        super().__init__()
        whole: Any = WORKLOADS["gpt"].model()
        self.embed, self.blocks, self.head = whole.embed, nn.Sequential(*whole.blocks[:2]), whole.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def classified(rank: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4 * size, 64, generator=generator), torch.randint(10, (4 * size,), generator=generator)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))


GPT, SMALL = WORKLOADS["gpt"], WORKLOADS["small"]
WORKS = {  # and the size of a rank's batch
    "MLP": (Workload(mlp, classified, F.cross_entropy), 4),
    "200 layers of 64": (SMALL, 4),
    "2 blocks of the GPT": (Workload(Words, GPT.batch, GPT.loss), 1),
}


def sharded(work: Workload, batch: tuple[Tensor, ...], mesh: fs.Mesh, backend: str = "") -> Step:
    torch.manual_seed(0)
    model = work.model()
    update, trees = training_step(model, fs.plan(model, mesh), work.loss, donate=False)
    step = mesh.spmd(update)
    rows, run = mesh.split(batch), fs.compile(step, backend=backend) if backend else step

    def again() -> Tensor:
        *trees[:], value = run(*trees, *rows)
        return value

    return again


def unsharded(work: Workload, batches: Sequence[tuple[Tensor, ...]]) -> Step:
    torch.manual_seed(0)
    model = work.model()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        opt.zero_grad()
        losses = []
        for x, y in batches:
            value = work.loss(model(x), y) / len(batches)
            value.backward()
            losses.append(value.detach())
        opt.step()
        return torch.stack(losses).sum()

    return step


def contenders(work: Workload, size: int, ranks: int, backends: Sequence[str]) -> dict[str, Step]:
    batches = [work.batch(rank, size) for rank in range(ranks)]
    whole = tuple(torch.cat(each) for each in zip(*batches, strict=True))
    mesh = fs.simulated_mesh(ranks)
    return {
        LOOP: unsharded(work, batches),
        "one batch": unsharded(work, [whole]),
        "simulated": sharded(work, whole, mesh),
        **{f"simulated, {backend}": sharded(work, whole, mesh, backend) for backend in backends},
        "one after the other": sharded(work, whole, fs.simulated_mesh(ranks, kind="sequential")),
    }


def main() -> None:
    chosen = command_line(__doc__, ranks=4, rounds=15, models=[*WORKS], backends=["replay"])
    torch.set_num_threads(1)
    print(f"{chosen.ranks} simulated ranks, one thread; ms, ratio to a {LOOP}, first call, of {chosen.rounds} steps")
    for name in chosen.models:
        steps = contenders(*WORKS[name], chosen.ranks, chosen.backends)
        first = {contender: milliseconds(step) for contender, step in steps.items()}
        losses = {contender: [step().mean() for _ in range(2)] for contender, step in steps.items()}
        for each in losses.values():
            torch.testing.assert_close(each, losses[LOOP], rtol=1e-3, atol=1e-4)
        medians = {contender: statistics.median(ms) for contender, ms in in_turns(steps, chosen.rounds).items()}
        print(name)
        for contender, ms in medians.items():
            print(f"  {contender:22s} {ms:8.2f}  {ms / medians[LOOP]:6.2f}  {first[contender]:8.0f}")


if __name__ == "__main__":
    main()
