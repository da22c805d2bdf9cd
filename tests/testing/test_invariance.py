"""Programs that give the same on any ranks pass; their mutants, and whatever else depends on ranks, are noticed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_rank_invariant, count_collectives, mutants
from tests.support.pool import run_ranks
from tests.support.scripts import example

first_step = example("unit_test_your_sharding").first_step
HYBRID = {"replicate": 2, "shard": 2}
close = partial(assert_rank_invariant, rtol=0, atol=1e-12)


def on_this_rank(axes: Any, program: Any) -> None:
    close(program, [1, fs.init_mesh(axes)])


def failure(program: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_rank_invariant(program, *args, **options)
    return str(caught.value)


def test_a_step_is_the_same_on_simulated_and_on_real_ranks() -> None:
    close(first_step, [1, {"replicate": 3, "shard": 1}, fs.init_mesh()])
    run_ranks(on_this_rank, 4, HYBRID, first_step)


def test_each_collective_of_a_step_has_a_mutant_of_each_change() -> None:
    mesh = fs.simulated_mesh(HYBRID, kind="sequential")
    with count_collectives() as seen:
        first_step(mesh)
    made = mutants(first_step)
    named = lambda ops: [(str(op), op.key) for op in ops if op.kind != "exchange"]  # noqa: E731
    assert named(m.collective for m in made[::3]) == named(seen.issued)  # a record has neither device nor memory
    assert {(m.number, m.change) for m in made} == {
        (number, change)
        for number, op in enumerate(m.collective for m in made[::3])
        for change in ("dropped", "doubled", "shard" if op.axis == "replicate" else "replicate")
    }


def test_a_mutant_is_noticed_on_real_ranks() -> None:
    dropped = next(m for m in mutants(first_step) if m.collective.kind == "psum_scatter")
    with pytest.raises(AssertionError, match=r"on Mesh\(shard=2, cpu\), unlike Mesh\(shard=1"):
        run_ranks(on_this_rank, 2, {"shard": 2}, dropped)


def test_the_first_mesh_that_differs_and_its_leaves_are_named_with_the_difference() -> None:
    lines = failure(lambda mesh: {"same": 1, "sizes": [mesh.size]}, [1, 1, {"a": 3}, 2]).splitlines()
    assert lines[0] == "assert_rank_invariant: on Mesh(a=3, simulated, cpu), unlike Mesh(shard=1, simulated, cpu):"
    assert lines[1:] == ["1 leaf differs:", "  ['sizes'][0]: got 3, expected 1"]
    assert "Absolute difference: 1.0" in failure(lambda mesh: {"w": torch.tensor(float(mesh.size))}, [2, 3])


def test_a_value_of_each_rank_is_no_whole_value() -> None:
    assert "shape" in failure(lambda mesh: mesh.spmd(lambda x: x.mean())(mesh.split(torch.arange(12.0))))


def test_copies_of_a_tree_have_to_be_equal() -> None:
    def drifted(mesh: fs.Mesh) -> fs.Sharded:
        params = fs.shard({"a.w": torch.ones(5)}, fs.plan({"a.w": torch.ones(5)}, mesh))
        own = lambda p: fs.Sharded({"a": p["a"] + fs.collectives.axis_index(mesh["replicate"])}, p.layout)  # noqa: E731
        return mesh.spmd(own)(params)

    assert "copies of a" in failure(drifted, [{"replicate": 1, "shard": 2}, HYBRID])


def test_parameters_are_compared_as_they_are_stored() -> None:
    def program(mesh: fs.Mesh) -> fs.Sharded:
        source = {"a.w": torch.full((3,), 1 + 2**-12) + 2**-12 * mesh.size, "b.steps": torch.tensor(3)}
        params = fs.shard(source, fs.plan(source, mesh, precision=fs.MixedPrecision(torch.bfloat16)))
        return fs.Sharded({**params, "b/frozen": None}, params.layout)

    assert "['a.w']" in failure(program, [1, 2])
