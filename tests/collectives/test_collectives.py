"""Collectives are exact linear maps under every transform and at every order, and real ranks compute the same."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import functorch_shard as fs
from functorch_shard.collectives import all_gather, axis_index, pmax, pmean, pmin, psum, psum_scatter
from functorch_shard.testing import assert_trees_close
from tests.support import reference
from tests.support.programs import PROGRAMS, TRANSFORMS, cases, on_rank, on_rows
from tests.support.ranks import Ranks, gloo, on_each, rows_of, sequential, simulated, slow
from tests.support.refusals import refused

NAN, INF = float("nan"), float("inf")


def computed(mesh: fs.Mesh) -> list[Tensor]:
    every = [(case, rows_of(mesh, list(case.rows()))) for case in cases(mesh.size)]
    return [mesh.spmd(case.on_rank(mesh["shard"]))(*mine) for case, mine in every]


@pytest.mark.parametrize(
    "ranks", [*simulated(1, 3), *gloo(2), *slow([*simulated(2, 5), *sequential(2), *gloo(3)])], ids=str
)
def test_simulated_and_real_ranks_compute_what_a_loop_over_ranks_does(ranks: Ranks) -> None:
    batch, results = list(cases(ranks.size)), ranks.run(computed)
    assert len(batch) == len(PROGRAMS) * len(TRANSFORMS)
    for case, *rows in zip(batch, *results, strict=True):
        expected = {str(case): case.expected()}
        assert_trees_close({str(case): torch.stack(rows)}, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("program", PROGRAMS)
def test_vmaps_on_both_sides_of_the_ranks_nest(program: str) -> None:
    mesh = fs.simulated_mesh(3)
    rows = torch.randn(3, 2, 3, 4, 6, dtype=torch.float64)  # (ranks, outer batch, dim, inner batch, dim)
    inner = mesh.spmd(lambda x: vmap(on_rank(program, mesh), in_dims=1)(x))
    actual = vmap(inner, in_dims=1, out_dims=1)(rows)

    def one(i: int, j: int) -> Tensor:
        return on_rows(program, rows[:, i, :, j])

    expected = torch.stack([torch.stack([one(i, j) for j in range(4)], 1) for i in range(2)], 1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 3), (2, 2, 2)])
@pytest.mark.parametrize("verb", reference.COLLECTIVES)
def test_a_mesh_of_several_axes_is_one_axis_in_row_major_order(verb: str, sizes: tuple[int, ...]) -> None:
    mesh = fs.simulated_mesh(dict(zip("abc", sizes, strict=False)))
    rows = torch.randn(*sizes, 2 * mesh.size, 3, dtype=torch.float64)
    how, collective = reference.OPTIONS[verb](mesh.size), getattr(fs.collectives, verb)
    actual = mesh.spmd(lambda x: axis_index(mesh) if verb == "axis_index" else collective(x, mesh, **how))(rows)
    expected = torch.stack(list(reference.COLLECTIVES[verb](list(rows.flatten(0, len(sizes) - 1)), how or 0)))
    torch.testing.assert_close(actual.flatten(0, len(sizes) - 1), expected)


VERBS = [verb for verb in reference.COLLECTIVES if verb != "axis_index"]


@on_each([*simulated(1, 2), *gloo(2)])
def test_booleans_are_counted_and_integers_averaged_on_any_number_of_ranks(mesh: fs.Mesh) -> None:
    for verb, dtype, counted in ((psum, torch.bool, torch.int64), (pmean, torch.uint8, torch.float32)):
        rows = torch.ones(mesh.size, 3).to(dtype)
        got = mesh.spmd(lambda x: verb(x, mesh))(rows_of(mesh, rows))  # noqa: B023
        expected = torch.full((mesh.size, 3), mesh.size if verb is psum else 1).to(counted)
        assert_trees_close(got, rows_of(mesh, expected), rtol=0, atol=0)


def test_ranks_that_tie_for_the_largest_share_its_gradient() -> None:
    mesh = fs.simulated_mesh(4)
    rows = torch.tensor([1.0, 5.0, 5.0, 2.0])
    assert torch.equal(mesh.spmd(torch.func.grad(lambda x: pmax(x, mesh)))(rows), torch.tensor([0.0, 2.0, 2.0, 0.0]))


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# By column: a NaN on one rank, of either sign; infinities; signs; zeros; what a narrow dtype rounds to zero.
EXTREMES = [
    [NAN, 1.0, INF, NAN, -INF, -INF, -1.0, -2.0, 3.0, 0.0, -0.0, 1e-45, -1e-7, 65504.0],
    [1.0, NAN, NAN, -INF, NAN, -5.0, -2.0, -1.0, -3.0, -1e-7, 0.0, 0.0, -2e-7, -65504.0],
]


INTEGERS = [torch.tensor([[-128, 127], [0, -1]], dtype=torch.int8), torch.tensor([[0, 255], [1, 254]]).byte()]


@on_each([*simulated(2), *gloo(2)])
def test_the_largest_and_the_smallest_of_nan_infinities_and_integers(mesh: fs.Mesh) -> None:
    rows = torch.tensor(EXTREMES, dtype=torch.float64)
    rows[:, 1] = -rows[:, 1]  # a NaN may have a sign
    given = [x for dtype in FLOATS for x in (rows.to(dtype), rows.to(dtype)[:, 3], rows[:, :0])]
    for x, (verb, whole) in product([*given, *INTEGERS], ((pmax, torch.amax), (pmin, torch.amin))):
        got = mesh.spmd(lambda x: verb(x, mesh))(rows_of(mesh, x))  # noqa: B023
        assert_trees_close(got, rows_of(mesh, whole(x, 0).expand_as(x)), rtol=0, atol=0)


def test_an_axis_of_one_rank_sends_nothing() -> None:
    x = torch.randn(4, 2)
    for mesh, verb in product((fs.init_mesh(), fs.simulated_mesh(1)), VERBS):
        how = reference.OPTIONS[verb](1)
        with fs.testing.count_collectives() as seen:
            got = getattr(fs.collectives, verb)(x, mesh, **how)
        assert torch.equal(got, reference.COLLECTIVES[verb]([x], how or 0)[0])
        assert seen.total == 0
        assert got.data_ptr() != x.data_ptr()  # so that a program may write to it, as on several ranks
    assert axis_index(fs.init_mesh()).item() == 0
    with torch.device("meta"):  # what is made without a device has no values
        assert axis_index(fs.init_mesh()).item() == 0


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
