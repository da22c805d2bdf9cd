"""Sums are rounded after each addend, in rank order: bitwise alike on real and on simulated ranks."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.collectives import psum, psum_scatter
from functorch_shard.gloo.backend import SMALL_MESSAGE, SMALL_SUM, GlooBackend
from tests.support.pool import run_ranks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int32]
SPECIAL = [0.0, -0.0, 4e4, -4e4, float("inf"), -float("inf"), float("nan"), 1e-8, 256.0, 1.0]
# Elements for 2, 3 and 4 ranks alike.
SIZES = {"envelope": 60, "sockets": 12 * 4001, "shared memory": 12 * 4003}


def rows_of(num_ranks: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Row r is rank r's: of very different magnitudes, and special values in all combinations of neighbours."""
    generator = torch.Generator().manual_seed(numel)
    rows = torch.randn(num_ranks, numel, generator=generator, dtype=torch.float64)
    rows *= 10.0 ** torch.randint(-3, 4, rows.shape, generator=generator)
    if dtype.is_floating_point:
        picked = torch.tensor(SPECIAL, dtype=torch.float64)[torch.randint(10, (num_ranks, 50), generator=generator)]
        rows[:, :50] = picked
    return torch.complex(rows, rows.flip(0)).to(dtype) if dtype.is_complex else rows.to(dtype)


def added_in_order(rows: Tensor) -> Tensor:
    total, *others = rows.unbind(0)
    for row in others:
        total = total + row
    return total


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Signs of zeros included; which of all NaNs it is, torch's own kernels leave to where in memory a number lies."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bytes_of(a), bytes_of(b))


def bytes_of(x: Tensor) -> Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    return real.masked_fill(real.isnan(), 0 if x.dtype == torch.int32 else torch.nan).flatten().view(torch.uint8)


def sums_on_this_rank() -> list[str]:
    mesh, different = fs.init_mesh(), []
    simulated = fs.simulated_mesh(mesh.size)
    for kind, numel in SIZES.items():
        for dtype in DTYPES:
            rows = rows_of(mesh.size, numel, dtype)
            expected, own = added_in_order(rows), rows[mesh.rank]
            with patch.object(GlooBackend, "_memory", None) if kind == "sockets" else nullcontext():
                real = psum(own, mesh), psum_scatter(own, mesh)
            stacked = simulated.spmd(lambda x: (psum(x, simulated), psum_scatter(x, simulated)))(rows)
            for x, parts in zip(real, stacked, strict=True):
                whole = expected if x.numel() == numel else expected.chunk(mesh.size)[mesh.rank]
                if not (same_bytes(x, whole) and same_bytes(parts[mesh.rank], whole)):
                    different.append(f"{kind} {dtype} {x.numel()}")
    return different


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_are_added_in_rank_order_bitwise_on_real_and_simulated_ranks(num_ranks: int) -> None:
    assert run_ranks(sums_on_this_rank, num_ranks) == [[]] * num_ranks


def test_the_sizes_go_each_way() -> None:
    assert SIZES["envelope"] * 16 < SMALL_MESSAGE // 2 < SMALL_SUM < SIZES["sockets"] * 2


def overflow_on_this_rank() -> list[float]:
    mesh = fs.init_mesh()
    values = [torch.tensor([4e4, 4e4, -4e4][mesh.rank], dtype=dtype) for dtype in (torch.float16, torch.float32)]
    return [psum(x, mesh).item() for x in values]


def test_a_sum_that_overflows_on_its_way_is_infinite_on_simulated_ranks_too() -> None:
    mesh = fs.simulated_mesh(3)
    rows = torch.tensor([4e4, 4e4, -4e4])
    simulated = [mesh.spmd(lambda x: psum(x, mesh))(x)[0].item() for x in (rows.half(), rows)]
    assert simulated == [float("inf"), 4e4]
    assert run_ranks(overflow_on_this_rank, 3) == [simulated] * 3
