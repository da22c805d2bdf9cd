"""The same programs under the same transforms on real gloo ranks, against the same reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import CollectiveCounter, count_collectives
from tests.support.pool import run_ranks
from tests.support.programs import PROGRAMS, TRANSFORMS, Case, as_rank, cases


def on_this_rank(batch: list[Case]) -> list[Tensor]:
    mesh = fs.init_mesh()
    results = [case.on_rank(mesh["shard"])(*(rows[mesh.rank] for rows in case.rows())) for case in batch]
    return [torch.zeros_like(x) + x for x in results]  # some tangents are torch's ZeroTensor, which cannot be pickled


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_real_ranks_compute_what_a_loop_over_ranks_does(num_ranks: int) -> None:
    batch = list(cases(num_ranks))
    assert len(batch) == len(PROGRAMS) * len(TRANSFORMS)
    results = run_ranks(on_this_rank, num_ranks, batch)
    for i, case in enumerate(batch):
        actual = torch.stack([result[i] for result in results])
        torch.testing.assert_close(actual, case.expected(), rtol=1e-10, atol=1e-10, msg=lambda m, c=case: f"{c}: {m}")


def on_two_axes(rows: Tensor) -> dict[str, Tensor]:
    mesh = fs.init_mesh({"a": 2, "b": -1})
    mine = rows.flatten(0, 1)[mesh.rank]
    with_axes = {f"{name} {axis}": as_rank(PROGRAMS[name], mesh[axis])(mine) for name in PROGRAMS for axis in mesh.axes}
    return {**with_axes, **{name: as_rank(PROGRAMS[name], mesh)(mine) for name in PROGRAMS}}


def test_two_axes_of_real_ranks_are_two_axes_of_simulated_ones() -> None:
    mesh, rows = fs.simulated_mesh({"a": 2, "b": 2}), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    results = run_ranks(on_two_axes, 4, rows)
    for name in PROGRAMS:
        for key, axis in {name: mesh, f"{name} a": mesh["a"], f"{name} b": mesh["b"]}.items():
            expected = mesh.spmd(as_rank(PROGRAMS[name], axis))(rows).flatten(0, 1)
            actual = torch.stack([result[key] for result in results])
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn]


def dtypes_on_this_rank() -> list[tuple[Any, ...]]:
    mesh = fs.init_mesh()
    results = []
    for dtype in DTYPES:
        x = (torch.arange(4) + mesh.rank).remainder(3).to(dtype)
        gathered = fs.collectives.all_gather(x, mesh)
        assert gathered.dtype == dtype
        results.append((gathered.view(torch.uint8), fs.collectives.all_gather(x[:0], mesh).shape))
        if dtype != torch.float8_e4m3fn:  # torch has no sum of it
            results[-1] += (fs.collectives.psum_scatter(x, mesh),)
        if dtype not in (torch.float8_e4m3fn, torch.int16):  # gloo has no all-reduce of it
            results[-1] += (fs.collectives.psum(x, mesh),)
    return results


def test_every_dtype_travels_between_real_ranks() -> None:
    first, second = run_ranks(dtypes_on_this_rank, 2)
    for dtype, mine, theirs in zip(DTYPES, first, second, strict=True):
        rows = [(torch.arange(4) + rank).remainder(3).to(dtype) for rank in range(2)]
        assert torch.equal(mine[0], torch.cat([row.view(torch.uint8) for row in rows]))
        assert mine[1] == (0,)
        if dtype != torch.float8_e4m3fn:
            mine_and_theirs = [row.long() if dtype == torch.bool else row for row in rows]
            total = mine_and_theirs[0] + mine_and_theirs[1]
            assert torch.equal(torch.cat([mine[2], theirs[2]]), total)
            assert all(torch.equal(x, total) for x in mine[3:])


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")
# By column: a NaN on one rank, of either sign; infinities; signs; zeros; what a narrow dtype rounds to zero.
EXTREMES = [
    [NAN, 1.0, INF, NAN, -INF, -INF, -1.0, -2.0, 3.0, 0.0, -0.0, 1e-45, -1e-7, 65504.0],
    [1.0, NAN, NAN, -INF, NAN, -5.0, -2.0, -1.0, -3.0, -1e-7, 0.0, 0.0, -2e-7, -65504.0],
]


def largest_on_this_rank() -> list[Tensor]:
    mesh = fs.init_mesh()
    mine = torch.tensor(EXTREMES, dtype=torch.float64)[mesh.rank]
    mine[1] = -mine[1]  # a NaN may have a sign
    return [fs.collectives.pmax(x, mesh) for dtype in FLOATS for x in (mine.to(dtype), mine.to(dtype)[3], mine[:0])]


def test_the_largest_value_of_real_ranks_is_that_of_simulated_ones_nan_included() -> None:
    rows, mesh = torch.tensor(EXTREMES, dtype=torch.float64), fs.simulated_mesh(2)
    rows[:, 1] = -rows[:, 1]
    largest = mesh.spmd(lambda x: fs.collectives.pmax(x, mesh))
    expected = [largest(x)[0] for dtype in FLOATS for x in (rows.to(dtype), rows.to(dtype)[:, 3])]
    for result in run_ranks(largest_on_this_rank, 2):
        assert [x.shape for x in result[2::3]] == [(0,)] * len(FLOATS)
        for actual, wanted in zip([x for i, x in enumerate(result) if i % 3 < 2], expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
            assert actual.dtype == wanted.dtype


def step_of(mesh: fs.Mesh) -> Any:
    def step(x: Tensor) -> Tensor:
        loss = lambda x: fs.collectives.all_gather(x, mesh).square().sum()  # noqa: E731
        return fs.collectives.pmean(torch.func.grad(loss)(x), mesh)

    return mesh.spmd(step)


def counted_on_this_rank() -> CollectiveCounter:
    with count_collectives() as seen:
        step_of(fs.init_mesh())(torch.ones(3, 2))
    return seen


def test_real_and_simulated_ranks_issue_the_same_collectives() -> None:
    with count_collectives() as simulated:
        step_of(fs.simulated_mesh(2))(torch.ones(2, 3, 2))
    assert [seen.issued for seen in run_ranks(counted_on_this_rank, 2)] == [simulated.issued] * 2
    assert simulated.by_kind == {"all_gather": 1, "psum_scatter": 1, "psum": 1}


def meshes_on_this_rank() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    named = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    texts = [
        repr(fs.init_mesh()),
        repr(fs.Mesh.from_device_mesh(named)),
        repr(fs.init_mesh({"replicate": 1, "shard": -1})),
    ]
    for wrong in (
        lambda: fs.init_mesh({"shard": 5}),
        lambda: fs.Mesh.from_device_mesh(init_device_mesh("cpu", (world,))),
    ):
        try:
            wrong()
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_meshes_come_from_the_process_group_or_from_a_device_mesh() -> None:
    texts = run_ranks(meshes_on_this_rank, 2)[1]
    assert texts[:3] == ["Mesh(shard=2, cpu)", "Mesh(data=2, cpu)", "Mesh(replicate=1 x shard=2, cpu)"]
    assert texts[3] == "init_mesh: shard=5 makes 5 ranks, but there are 2"
    assert "expected a device mesh with mesh_dim_names" in texts[4]
