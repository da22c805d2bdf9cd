"""Whatever way messages take, results are bitwise those of a loop over ranks, on real and on simulated ones.

Sums are rounded after each addend, in rank order.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.gloo.backend import SMALL_MESSAGE, SMALL_SUM, GlooBackend
from tests.support import reference
from tests.support.ranks import Ranks, gloo, simulated, slow

SUMMED = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int32]
DTYPES = [*SUMMED, torch.complex128, torch.int8, torch.float8_e4m3fn, torch.bool]
SPECIAL = [0.0, -0.0, 4e4, -4e4, float("inf"), -float("inf"), float("nan"), 1e-8, 256.0, 1.0]
WAYS = {"envelope": 1, "shared memory": 401, "sockets": 401}  # the last dim of operands


def rows_of_all(num_ranks: int, last: int, dtype: torch.dtype) -> Tensor:
    """Row r is rank r's, not contiguous: of very different magnitudes, and special values beside each other."""
    generator = torch.Generator().manual_seed(last)
    rows = torch.randn(num_ranks, last, 12, 12, generator=generator, dtype=torch.float64)
    rows *= 10.0 ** torch.randint(-3, 4, rows.shape, generator=generator)
    if dtype.is_floating_point:
        rows[:, 0, :6] = torch.tensor(SPECIAL).double()[torch.randint(10, (num_ranks, 6, 12), generator=generator)]
    rows = rows.transpose(1, 3)
    return torch.complex(rows, rows.flip(0)).to(dtype).conj() if dtype.is_complex else rows.to(dtype)


def cases(n: int, dtype: torch.dtype) -> list[tuple[str, Any]]:
    """Verbs, and what each needs besides its operand: a dim, or options."""
    table = [[0 if i == j else 1 + (i + 2 * j) % 3 for j in range(n)] for i in range(n)]
    found: list[tuple[str, Any]] = [("all_gather", 0), ("all_gather", 1)]
    found += [("all_to_all", {"split_dim": 0, "concat_dim": 1}), ("ragged_all_to_all", {"sizes": table})]
    found += [("ppermute", {"perm": [(i, i + 1) for i in range(n - 1)]})]
    found += [("broadcast", {"from_rank": n - 1})] if dtype.itemsize > 1 else []  # torch masks no float8
    found += [("psum", None), ("psum_scatter", 0), ("psum_scatter", 1)] if dtype in SUMMED else []
    return found + ([("pmax", None)] if dtype in SUMMED and not dtype.is_complex else [])


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Signs of zeros included; which of all NaNs it is, torch's own kernels leave to where in memory a number lies."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bytes_of(a), bytes_of(b))


def bytes_of(x: Tensor) -> Tensor:
    real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    real = real.masked_fill(real.isnan(), 1) if real.dtype in SUMMED else real
    return real.contiguous().flatten().view(torch.uint8)


def differences(mesh: fs.Mesh) -> list[str]:
    found, axis, n = list[str](), mesh["shard"], mesh.size
    for way, last in WAYS.items():
        for dtype in DTYPES:
            rows = rows_of_all(n, last, dtype)
            for verb, how in cases(n, dtype):
                options = {"dim": how} if isinstance(how, int) else how or {}
                call = lambda x, verb=verb, options=options: getattr(fs.collectives, verb)(x, mesh, **options)  # noqa: E731
                expected = reference.COLLECTIVES[verb]([*rows], how)
                if mesh.is_simulated:
                    pairs = zip(mesh.spmd(call)(rows), expected, strict=True)
                else:
                    with patch.object(GlooBackend, "_memory", None) if way == "sockets" else nullcontext():
                        pairs = [(call(rows[mesh.rank]), expected[mesh.rank])]
                        if verb == "all_gather":  # into memory of all ranks, and cast on the way
                            for to in (dtype, torch.bfloat16 if dtype == torch.float32 else dtype):
                                work = axis.issue(verb, rows[mesh.rank], dim=how, dtype=to, transient=True)
                                pairs += [(work.wait(), expected[0].to(to))]
                found += [f"{way} {verb} {how} {dtype}" for x, y in pairs if not same_bytes(x, y)]
    assert mesh.is_simulated or getattr(axis.backend, "_memory", None) is not None
    return found


@pytest.mark.parametrize("ranks", [*simulated(3), *gloo(3), *slow(gloo(2, 4))], ids=str)
def test_every_collective_of_each_dtype_is_bitwise_that_of_a_loop_over_ranks(ranks: Ranks) -> None:
    for found in ranks.run(differences):
        assert found == []


def test_the_sizes_go_each_way() -> None:
    assert 144 * 16 < SMALL_MESSAGE // 2 < SMALL_SUM < 144 * 401 * 2
