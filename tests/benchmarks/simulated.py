"""A step on simulated ranks, beside the same step without shards: a loop over the ranks' batches, and all in one batch.

python -m tests.benchmarks.simulated    # 4 simulated ranks, four models with AdamW: two minutes

Every contender takes the same samples and the same optimizer class. Each row names the operators that vmap runs rank
by rank, for want of a batching rule.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_shard as fs
from tests.benchmarks.simulated_step import adamw_step
from tests.benchmarks.workloads import WORKLOADS, Block

Step = Callable[[], Tensor]
LOOP = "loop over batches"


@dataclass(frozen=True)
class Work:
    """A model, one rank's batch, and the loss of it."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]  # of a rank
    loss: Callable[[Tensor, Tensor], Tensor]


class Words(nn.Module):
    """Two blocks of the benchmark's GPT."""

    def __init__(self) -> None:
        super().__init__()
        whole: Any = WORKLOADS["gpt"].model()
        self.embed, self.blocks, self.head = whole.embed, nn.Sequential(Block(), Block()), whole.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def rows_and_classes(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(16, 64, generator=generator), torch.randint(10, (16,), generator=generator)


def images_and_classes(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(16, 3, 16, 16, generator=generator), torch.randint(10, (16,), generator=generator)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))


def convolutions() -> nn.Module:
    first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2)
    return nn.Sequential(
        first, nn.GroupNorm(4, 32), nn.ReLU(), second, nn.ReLU(), nn.Flatten(1), nn.Linear(64 * 49, 10)
    )


GPT, SMALL = WORKLOADS["gpt"], WORKLOADS["small"]
WORKS = {
    "MLP": Work(mlp, rows_and_classes, F.cross_entropy),
    "200 layers of 64": Work(SMALL.model, lambda rank: SMALL.batch(rank, 4), SMALL.loss),
    "convolutions": Work(convolutions, images_and_classes, F.cross_entropy),
    "2 blocks of the GPT": Work(Words, lambda rank: GPT.batch(rank, 1), GPT.loss),
}


def sharded(work: Work, mesh: fs.Mesh, backend: str = "") -> Step:
    torch.manual_seed(0)
    model = work.model()
    step, trees = adamw_step(mesh, model, work.loss)
    batch = mesh.split(tuple(torch.cat(each) for each in zip(*map(work.batch, range(mesh.size)), strict=True)))
    run = fs.compile(step, backend=backend) if backend else step

    def again() -> Tensor:
        *trees[:], value = run(*trees, *batch)
        return value

    return again


def unsharded(work: Work, num_batches: int, one_batch: bool) -> Step:
    torch.manual_seed(0)
    model = work.model()
    opt, batches = torch.optim.AdamW(model.parameters(), lr=1e-3), [work.batch(rank) for rank in range(num_batches)]
    if one_batch:
        batches = [tuple(torch.cat(each) for each in zip(*batches, strict=True))]

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


def contenders(work: Work, ranks: int) -> dict[str, Step]:
    return {
        LOOP: unsharded(work, ranks, one_batch=False),
        "one batch": unsharded(work, ranks, one_batch=True),
        "simulated": sharded(work, fs.simulated_mesh(ranks)),
        "simulated, replay": sharded(work, fs.simulated_mesh(ranks), "replay"),
        "one after the other": sharded(work, fs.simulated_mesh(ranks, kind="sequential")),
    }


def times(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds, in turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            found[name].append(1e3 * (time.perf_counter() - start))
    return found


def without_batching_rule(step: Step) -> set[str]:
    """The operators that vmap runs once for each rank, by torch's own warnings."""
    debug: Any = torch._C
    debug._debug_only_display_vmap_fallback_warnings(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return {str(each.message).split("for ")[1].split(".")[0] for each in caught if "batching rule" in str(each.message)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", default=[*WORKS], choices=[*WORKS])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{chosen.ranks} simulated ranks, one thread; ms, and the ratio to a {LOOP}, of {chosen.rounds} steps")
    for name in chosen.models:
        steps = contenders(WORKS[name], chosen.ranks)
        losses = {contender: [step().mean() for _ in range(3)] for contender, step in steps.items()}
        for each in losses.values():
            torch.testing.assert_close(each, losses[LOOP], rtol=1e-3, atol=1e-4)
        medians = {contender: statistics.median(ms) for contender, ms in times(steps, chosen.rounds).items()}
        cells = [f"{contender} {ms:.1f} ({ms / medians[LOOP]:.2f})" for contender, ms in medians.items()]
        print(
            f"{name}: {', '.join(cells)}; rank by rank: {', '.join(without_batching_rule(steps['simulated'])) or '-'}"
        )


if __name__ == "__main__":
    main()
