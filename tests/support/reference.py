"""What the library should compute, as naively as it can be said: a loop over ranks, on full tensors, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

# A program is what one rank does, with "yield" where it communicates: y = yield "psum", x, 0
Ask = tuple[str, Tensor, int]
Program = Callable[..., Generator[Ask, Tensor, Tensor]]


def run(program: Program, *rows: Tensor) -> Tensor:
    """``program`` on every row, all ranks in step; the results of the ranks as rows."""
    ranks = [program(*(x[r] for x in rows)) for r in range(len(rows[0]))]
    answers: Sequence[Any] = [None] * len(ranks)
    while True:
        asks, results = [], []
        for rank, answer in zip(ranks, answers, strict=True):
            try:
                asks.append(rank.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if results:
            return torch.stack(results)
        verb, _, dim = asks[0]
        answers = COLLECTIVES[verb]([x for _, x, _ in asks], dim)


COLLECTIVES: dict[str, Callable[[list[Tensor], int], Sequence[Tensor]]] = {
    "psum": lambda xs, _: [sum(xs[1:], xs[0])] * len(xs),
    "pmean": lambda xs, _: [sum(xs[1:], xs[0]) / len(xs)] * len(xs),
    "pmax": lambda xs, _: [torch.stack(xs).amax(0)] * len(xs),
    "all_gather": lambda xs, dim: [torch.cat(xs, dim)] * len(xs),
    "psum_scatter": lambda xs, dim: sum(xs[1:], xs[0]).chunk(len(xs), dim),
    "axis_index": lambda xs, _: [torch.tensor(r) for r in range(len(xs))],
}


def data_parallel_loss(
    loss: Callable[..., Tensor], reduction: str, parameters: dict[str, Tensor], *rows: Tensor
) -> Tensor:
    """The mean (or the sum) over ranks of what each returns: the one convention of gradients."""
    losses = torch.stack([loss(parameters, *(x[r] for x in rows)) for r in range(len(rows[0]))])
    return losses.mean() if reduction == "mean" else losses.sum()
