"""What the library should compute, as naively as it can be said: a loop over ranks, on full tensors, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _all_to_all(xs: list[Tensor], o: Any) -> list[Tensor]:
    """Part r of each rank, side by side."""
    return [torch.cat([x.chunk(len(xs), o["split_dim"])[r] for x in xs], o["concat_dim"]) for r in range(len(xs))]


def _ragged_all_to_all(xs: list[Tensor], o: Any) -> list[Tensor]:
    """The rows that each rank has for rank r, one below the other, and zeros up to the most that a rank gets."""
    sizes, dim, results = o["sizes"], o.get("dim", 0), []
    for r in range(len(xs)):
        got = [x.transpose(0, dim)[sum(row[:r]) : sum(row[: r + 1])] for x, row in zip(xs, sizes, strict=True)]
        missing = max(map(sum, zip(*sizes, strict=True))) - sum(map(len, got))
        zeros = torch.zeros_like(xs[0].transpose(0, dim)[:1]).expand(missing, *[-1] * (xs[0].ndim - 1))
        results.append(torch.cat([*got, zeros]).transpose(0, dim))
    return results


def _ppermute(xs: list[Tensor], o: Any) -> list[Tensor]:
    senders = {to: sender for sender, to in o["perm"]}
    return [xs[senders[r]] if r in senders else torch.zeros_like(xs[r]) for r in range(len(xs))]


COLLECTIVES: dict[str, Callable[[list[Tensor], Any], Sequence[Tensor]]] = {
    "psum": lambda xs, _: [sum(xs[1:], xs[0])] * len(xs),
    "pmean": lambda xs, _: [sum(xs[1:], xs[0]) / len(xs)] * len(xs),
    "pmax": lambda xs, _: [torch.stack(xs).amax(0)] * len(xs),
    "all_gather": lambda xs, dim: [torch.cat(xs, dim)] * len(xs),
    "psum_scatter": lambda xs, dim: sum(xs[1:], xs[0]).chunk(len(xs), dim),
    "pmin": lambda xs, _: [torch.stack(xs).amin(0)] * len(xs),
    "all_to_all": _all_to_all,
    "ragged_all_to_all": _ragged_all_to_all,
    "ppermute": _ppermute,
    "broadcast": lambda xs, o: [xs[o["from_rank"]]] * len(xs),
    "axis_index": lambda xs, _: [torch.tensor(r) for r in range(len(xs))],
}
# What a collective needs besides its operand, for a number of ranks.
OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    **dict.fromkeys(COLLECTIVES, lambda n: {}),
    "all_to_all": lambda n: {"split_dim": 0, "concat_dim": 1},
    "ragged_all_to_all": lambda n: {"sizes": [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]},
    "ppermute": lambda n: {"perm": [(i, (i + 1) % n) for i in range(n // 2)]},
    "broadcast": lambda n: {"from_rank": n - 1},
}


def data_parallel_loss(
    loss: Callable[..., Tensor], reduction: str, parameters: dict[str, Tensor], *rows: Tensor
) -> Tensor:
    """The mean (or the sum) over ranks of what each returns: the one convention of gradients."""
    losses = torch.stack([loss(parameters, *(x[r] for x in rows)) for r in range(len(rows[0]))])
    return losses.mean() if reduction == "mean" else losses.sum()


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """The scalar product of two trees."""
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()
