"""Collectives are exact linear maps under every transform and at every order, and real ranks compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import functorch_shard as fs
from functorch_shard.collectives import all_gather, axis_index, pmax, pmean, psum, psum_scatter
from functorch_shard.testing import assert_trees_close
from tests.support import reference
from tests.support.programs import PROGRAMS, TRANSFORMS, as_rank, cases
from tests.support.ranks import Ranks, gloo, rows_of, sequential, simulated, slow
from tests.support.refusals import refused

# What a collective needs besides its operand, for a number of ranks.
OPTIONS: dict[str, Callable[[int], Any]] = {
    "all_to_all": lambda n: {"split_dim": 0, "concat_dim": 1},
    "ragged_all_to_all": lambda n: {"sizes": [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]},
    "ppermute": lambda n: {"perm": [(i, (i + 1) % n) for i in range(n // 2)]},
    "broadcast": lambda n: {"from_rank": n - 1},
}
NAN, INF = float("nan"), float("inf")


def computed(mesh: fs.Mesh) -> list[Tensor]:
    every = [(case, rows_of(mesh, list(case.rows()))) for case in cases(mesh.size)]
    return [mesh.spmd(case.on_rank(mesh["shard"]))(*mine) for case, mine in every]


@pytest.mark.parametrize(
    "ranks", [*simulated(1, 3), *sequential(2), *gloo(2), *slow([*simulated(2, 5), *gloo(3)])], ids=str
)
def test_simulated_and_real_ranks_compute_what_a_loop_over_ranks_does(ranks: Ranks) -> None:
    batch, results = list(cases(ranks.size)), ranks.run(computed)
    assert len(batch) == len(PROGRAMS) * len(TRANSFORMS)
    for case, *rows in zip(batch, *results, strict=True):
        expected = {str(case): case.expected()}
        assert_trees_close({str(case): torch.stack(rows)}, expected, rtol=1e-10, atol=1e-10)


def on_two_axes(mesh: fs.Mesh) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mine = rows_of(mesh, torch.randn(mesh.size, 4, 4, generator=generator, dtype=torch.float64))
    axes: dict[str, Any] = {"both": mesh, **{name: mesh[name] for name in mesh.axes}}
    return {f"{n} {key}": mesh.spmd(as_rank(PROGRAMS[n], axis))(mine) for n in PROGRAMS for key, axis in axes.items()}


@pytest.mark.parametrize("ranks", gloo({"a": 2, "b": 2}), ids=str)
def test_two_axes_of_real_ranks_are_two_axes_of_simulated_ones(ranks: Ranks) -> None:
    assert_trees_close(ranks.run(on_two_axes), ranks.simulated.run(on_two_axes), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("program", PROGRAMS)
def test_vmaps_on_both_sides_of_the_ranks_nest(program: str) -> None:
    mesh = fs.simulated_mesh(3)
    rows = torch.randn(3, 2, 3, 4, 6, dtype=torch.float64)  # (ranks, outer batch, dim, inner batch, dim)
    inner = mesh.spmd(lambda x: vmap(as_rank(PROGRAMS[program], mesh), in_dims=1)(x))
    actual = vmap(inner, in_dims=1, out_dims=1)(rows)

    def one(i: int, j: int) -> Tensor:
        return reference.run(PROGRAMS[program], rows[:, i, :, j])

    expected = torch.stack([torch.stack([one(i, j) for j in range(4)], 1) for i in range(2)], 1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 3), (2, 2, 2)])
@pytest.mark.parametrize("verb", [verb for verb in reference.COLLECTIVES if verb not in OPTIONS] + [*OPTIONS])
def test_a_mesh_of_several_axes_is_one_axis_in_row_major_order(verb: str, sizes: tuple[int, ...]) -> None:
    mesh = fs.simulated_mesh(dict(zip("abc", sizes, strict=False)))
    rows = torch.randn(*sizes, 2 * mesh.size, 3, dtype=torch.float64)
    how = OPTIONS[verb](mesh.size) if verb in OPTIONS else {}
    collective: Any = getattr(fs.collectives, verb)
    actual = mesh.spmd(lambda x: axis_index(mesh) if verb == "axis_index" else collective(x, mesh, **how))(rows)
    expected = torch.stack(list(reference.COLLECTIVES[verb](list(rows.flatten(0, len(sizes) - 1)), how or 0)))
    torch.testing.assert_close(actual.flatten(0, len(sizes) - 1), expected)


@pytest.mark.parametrize(("program", "axis"), [*zip(PROGRAMS, "ab" * len(PROGRAMS), strict=False)])
def test_one_axis_of_two_leaves_the_other_alone(program: str, axis: str) -> None:
    mesh = fs.simulated_mesh({"a": 2, "b": 3})
    rows = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    actual = mesh.spmd(as_rank(PROGRAMS[program], mesh[axis]))(rows)
    dim = 1 - "ab".index(axis)  # the ranks of the other axis are independent
    expected = torch.stack([reference.run(PROGRAMS[program], x) for x in rows.unbind(dim)], dim)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


TRAVELLING = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool]
TRAVELLING += [torch.complex64, torch.float8_e4m3fn]


def dtypes_on_this_rank(mesh: fs.Mesh) -> list[tuple[Any, ...]]:
    results = []
    for dtype in TRAVELLING:
        x = (torch.arange(4) + mesh.rank).remainder(3).to(dtype)
        gathered = fs.collectives.all_gather(x, mesh)
        assert gathered.dtype == dtype
        results.append((gathered.view(torch.uint8), fs.collectives.all_gather(x[:0], mesh).shape))
        if dtype != torch.float8_e4m3fn:  # torch has no sum of it
            results[-1] += (fs.collectives.psum_scatter(x, mesh),)
        if dtype not in (torch.float8_e4m3fn, torch.int16):  # gloo has no all-reduce of it
            results[-1] += (fs.collectives.psum(x, mesh),)
    return results


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_every_dtype_travels_between_real_ranks(ranks: Ranks) -> None:
    first, second = ranks.run(dtypes_on_this_rank)
    for dtype, mine, theirs in zip(TRAVELLING, first, second, strict=True):
        rows = [(torch.arange(4) + rank).remainder(3).to(dtype) for rank in range(2)]
        assert torch.equal(mine[0], torch.cat([row.view(torch.uint8) for row in rows]))
        assert mine[1] == (0,)
        if dtype != torch.float8_e4m3fn:
            mine_and_theirs = [row.long() if dtype == torch.bool else row for row in rows]
            total = mine_and_theirs[0] + mine_and_theirs[1]
            assert torch.equal(torch.cat([mine[2], theirs[2]]), total)
            assert all(torch.equal(x, total) for x in mine[3:])


def test_booleans_are_counted_and_integers_averaged_in_floating_point() -> None:
    mesh = fs.simulated_mesh(3)
    flags = torch.tensor([True, False, True])
    assert torch.equal(mesh.spmd(lambda x: psum(x, mesh))(flags), torch.tensor([2, 2, 2]))
    assert torch.equal(mesh.spmd(lambda x: pmean(x, mesh))(torch.tensor([1, 2, 4])), torch.full((3,), 7 / 3))
    large = torch.full((3,), 200, dtype=torch.uint8)
    assert torch.equal(mesh.spmd(lambda x: pmean(x, mesh))(large), torch.full((3,), 200.0))


DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64)


def dtypes_of(mesh: fs.Mesh) -> dict[tuple[str, torch.dtype], torch.dtype]:
    """The dtype of each collective's result, by verb and dtype of the operand."""
    results: dict[tuple[str, torch.dtype], torch.dtype] = {}
    for verb in ("psum", "pmean", "pmax", "all_gather", "psum_scatter"):
        collective: Any = getattr(fs.collectives, verb)
        for dtype in DTYPES:
            x = torch.ones(mesh.size * mesh.size, dtype=dtype)
            results[verb, dtype] = mesh.spmd(lambda x, c=collective: c(x, mesh))(mesh.split(x)).dtype
    return results


@pytest.mark.parametrize("ranks", [*simulated(1, {"a": 1, "b": 2}), *gloo(2)], ids=str)
def test_dtypes_of_results_do_not_depend_on_the_number_of_ranks(ranks: Ranks) -> None:
    expected = dtypes_of(fs.simulated_mesh(2))
    assert ranks.run(dtypes_of) == [expected] * ranks.size
    assert dtypes_of(fs.init_mesh()) == expected
    assert {expected[verb, torch.bool] for verb in ("psum", "psum_scatter")} == {torch.int64}
    assert expected["psum", torch.int8] == torch.int8


def test_ranks_that_tie_for_the_largest_share_its_gradient() -> None:
    mesh = fs.simulated_mesh(4)
    rows = torch.tensor([1.0, 5.0, 5.0, 2.0])
    assert torch.equal(mesh.spmd(torch.func.grad(lambda x: pmax(x, mesh)))(rows), torch.tensor([0.0, 2.0, 2.0, 0.0]))


def pushed_twice(mesh: fs.Mesh) -> Any:
    """The second derivatives of functions of x**3 at 1, 2, ... along themselves, all of which depend on x twice."""
    x = rows_of(mesh, torch.arange(1.0, mesh.size + 1).unsqueeze(1))
    verbs: dict[str, Any] = {"pmax": pmax, "psum": psum, "pmean": pmean, "all_gather": all_gather}

    def of(x: Tensor) -> Any:
        def along(f: Any) -> Any:
            return lambda x: torch.func.jvp(f, (x,), (x,))[1]

        return {name: along(along(lambda x: verb(x**3, mesh)))(x) for name, verb in verbs.items()}  # noqa: B023

    return mesh.spmd(of)(x)


def test_forward_mode_over_forward_mode_is_that_of_one_process(ranks: Ranks) -> None:
    cubes = 9 * torch.arange(1.0, ranks.size + 1) ** 3  # x (x (x**3)')' is 9 x**3
    for result in ranks.run(pushed_twice):
        expected = {"pmax": cubes.max(), "psum": cubes.sum(), "pmean": cubes.mean()}
        assert_trees_close({name: result[name][0] for name in expected}, expected)
        assert_trees_close(result["all_gather"], cubes)


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# By column: a NaN on one rank, of either sign; infinities; signs; zeros; what a narrow dtype rounds to zero.
EXTREMES = [
    [NAN, 1.0, INF, NAN, -INF, -INF, -1.0, -2.0, 3.0, 0.0, -0.0, 1e-45, -1e-7, 65504.0],
    [1.0, NAN, NAN, -INF, NAN, -5.0, -2.0, -1.0, -3.0, -1e-7, 0.0, 0.0, -2e-7, -65504.0],
]


def largest(mesh: fs.Mesh) -> list[Tensor]:
    rows = torch.tensor(EXTREMES, dtype=torch.float64)
    rows[:, 1] = -rows[:, 1]  # a NaN may have a sign
    given = [x for dtype in FLOATS for x in (rows.to(dtype), rows.to(dtype)[:, 3], rows[:, :0])]
    return [mesh.spmd(lambda x: fs.collectives.pmax(x, mesh))(rows_of(mesh, x)) for x in given]


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_the_largest_value_of_real_ranks_is_that_of_simulated_ones_nan_included(ranks: Ranks) -> None:
    assert_trees_close(ranks.run(largest), ranks.simulated.run(largest), rtol=0, atol=0)


def test_an_axis_of_one_rank_is_the_identity_and_costs_nothing() -> None:
    x = torch.randn(3, 2)
    for mesh in (fs.init_mesh(), fs.simulated_mesh(1)):
        with fs.testing.count_collectives() as seen:
            for verb in (psum, pmean, pmax, all_gather, psum_scatter):
                assert torch.equal(verb(x, mesh), x)
        assert seen.total == 0
    assert axis_index(fs.init_mesh()).item() == 0
    with torch.device("meta"):  # what is made without a device has no values
        assert axis_index(fs.init_mesh()).item() == 0


def test_a_value_that_no_rank_changed_is_gathered_once_for_each() -> None:
    mesh = fs.simulated_mesh(3)
    same = torch.tensor([1.0, 2.0])
    assert torch.equal(mesh.spmd(lambda: all_gather(same, mesh), out_dims=None)(), same.repeat(3))
    assert torch.equal(mesh.spmd(lambda: psum(same, mesh), out_dims=None)(), 3 * same)


def test_inputs_are_never_written_to() -> None:
    mesh = fs.simulated_mesh(2)
    rows = torch.randn(2, 4)
    version = rows._version
    for verb in (psum, pmean, pmax, all_gather, psum_scatter):
        mesh.spmd(lambda x, verb=verb: verb(x, mesh))(rows)
        mesh.spmd(torch.func.grad(lambda x, verb=verb: verb(x, mesh).square().sum()))(rows)
    assert rows._version == version


def test_errors_name_every_leaf_and_the_arithmetic() -> None:
    mesh = fs.simulated_mesh(3)
    tree: Any = {"a": torch.zeros(3, 4), "b": torch.zeros(3, 5), "c": torch.zeros(3)}
    text = refused(mesh.spmd(lambda tree: psum_scatter(tree, mesh)), tree)
    assert text.startswith("ValueError: psum_scatter: 3 problems")
    assert "x['a']: 3 ranks do not divide dim 0 of shape (4,)" in text
    assert "x['c']: shape () has no dim 0" in text
    text = refused(mesh.spmd(lambda x: all_gather(x, mesh, dim=2)), torch.zeros(3, 4))
    assert "x: shape (4,) has no dim 2" in text
    text = refused(lambda: psum({"a": 1.0, "b": torch.zeros(3)}, mesh))
    assert text.startswith("TypeError: psum: 1 problem\n  x['a']: got float")


def test_simulated_ranks_do_not_exist_outside_spmd() -> None:
    mesh = fs.simulated_mesh(2)
    assert "only exist inside mesh.spmd" in refused(lambda: psum(torch.zeros(2), mesh))
    assert "only exist inside mesh.spmd" in refused(lambda: axis_index(mesh))


def test_an_axis_has_to_be_one() -> None:
    mesh = fs.simulated_mesh(2)
    wrong: Any = "shard"
    assert "expected a mesh or one of its axes" in refused(lambda: psum(torch.zeros(2), wrong))
    assert "the mesh has the axes shard=2" in refused(lambda: mesh["data"])
