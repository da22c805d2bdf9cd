"""Each rank has for each rank a part of its own size: what arrives is what was sent, on every transport."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication import Counter
from functorch_shard.gloo.backend import GlooBackend
from tests.support.ranks import Ranks, gloo, simulated

Splits = tuple[tuple[int, ...], ...]
KINDS = [*simulated(2, 3), *gloo(2, 3)]
WAYS = {"envelope": (11, torch.bfloat16), "shared memory": (5000, torch.complex64), "sockets": (5000, torch.bfloat16)}


def splits_of(size: int, largest: int) -> Splits:
    """Sizes that differ for each pair of ranks; nothing from a rank to itself, nor from the last to the first."""
    rows = [[0 if i == j else largest - 3 * i - j for j in range(size)] for i in range(size)]
    rows[-1][0] = 0
    return tuple(map(tuple, rows))


def part(i: int, j: int, numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(numel) % 97 + 100 * i + 10 * j).to(dtype)


def operand(mesh: fs.Mesh, splits: Splits, lead: int, dtype: torch.dtype) -> Tensor:
    rows = [
        torch.cat([part(i, j, n, dtype) for j, n in enumerate(row)]).expand(lead, -1) for i, row in enumerate(splits)
    ]
    if not mesh.is_simulated:
        return rows[mesh.rank]
    longest = max(row.shape[-1] for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, longest - row.shape[-1])) for row in rows])


def exchanged(
    mesh: fs.Mesh, largest: int, lead: int, dtype: torch.dtype, by_sockets: bool
) -> tuple[Tensor, tuple[int, int]]:
    counter, splits = Counter(), splits_of(mesh.size, largest)
    mesh = mesh.with_backend(counter)
    axis = mesh["shard"]
    with patch.object(GlooBackend, "_memory", None) if by_sockets else nullcontext():
        works = [axis.issue("ragged_all_to_all", operand(mesh, splits, lead, dtype), splits=splits) for _ in range(2)]
    first, second = (work.wait() for work in reversed(works))
    assert torch.equal(first, second)
    seen = counter["shard", "ragged_all_to_all"]
    return first, (seen.number, seen.sent)


@pytest.mark.parametrize("ranks", KINDS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_each_rank_receives_what_the_others_have_for_it(ranks: Ranks, way: str) -> None:
    largest, dtype = WAYS[way]
    splits, lead = splits_of(ranks.size, largest), 2
    for j, (received, (number, sent)) in enumerate(ranks.run(exchanged, largest, lead, dtype, way == "sockets")):
        expected = torch.cat([part(i, j, row[j], dtype) for i, row in enumerate(splits)])
        assert torch.equal(received[:, : len(expected)], expected.expand(lead, -1))
        mean = -(-lead * sum(map(sum, splits)) // ranks.size)
        assert (number, sent) == (2, 2 * mean * dtype.itemsize)
