"""What is not finite is found by name, by its index in the parameter's own shape, and by rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import count_collectives
from tests.support.norms import INF, NAN, Bad, some_none, spoiled, with_padding
from tests.support.ranks import Ranks, gloo, simulated
from tests.support.refusals import refused

ADVICE = "Gradients that overflow in float16 want fs.LossScale; torch.autograd.detect_anomaly() finds what made a NaN."
SWAPPED = {"shard": 2, "replicate": 2}
# Where a value is not finite, and the lines of two shards: (name, rank, values that the rank holds, what is wrong). The
# 527 elements of c.w are in shards of 264, and [8, 15] is element 263.
Line = tuple[str, int, int, str]
BAD: dict[str, tuple[Bad, list[Line]]] = {
    "one": ({"a.w": {(2, 3): NAN}}, [("a.w", 1, 4, "nan at [2, 3]")]),
    "first and last": (
        {"a.w": {(0, 0): INF}, "c.w": {(16, 30): -INF}},
        [("a.w", 0, 11, "inf at [0, 0]"), ("c.w", 1, 263, "-inf at [16, 30]")],
    ),
    "one shard, two values": ({"c.w": {(3, 8): NAN, (3, 7): -INF}}, [("c.w", 0, 264, "-inf at [3, 7]")]),
    "end of a shard": ({"c.w": {(8, 15): NAN}}, [("c.w", 0, 264, "nan at [8, 15]")]),
    "start of a shard": ({"c.w": {(8, 16): NAN}}, [("c.w", 1, 263, "nan at [8, 16]")]),
    "scalar": ({"b.s": {(): NAN}}, [("b.s", 0, 1, "nan at []")]),
}


def line_of(name: str, rank: int, held: int, first: str, count: int = 1) -> str:
    return f"{name!r} on rank {rank}: {count} of {held} values are not finite, the first is {first}"


def count_of(case: str) -> int:
    return 2 if case == "one shard, two values" else 1


def reported(tree: Any, what: str = "grads") -> list[str]:
    """The lines about parameters; what stands around them is the same every time."""
    with pytest.raises(FloatingPointError) as caught:
        fs.debug.assert_finite(tree, what)
    title, *lines, advice = str(caught.value).splitlines()
    assert title == f"assert_finite: {what}: {len(lines)} problem{'s' if len(lines) > 1 else ''}"
    assert advice == ADVICE
    return [line.removeprefix("  ") for line in lines]


def reported_of(mesh: fs.Mesh, case: str) -> list[str]:
    lines = reported(spoiled(mesh, BAD[case][0]))
    fs.debug.assert_finite(spoiled(mesh, {}))  # and afterwards the ranks are still in step
    return lines


@pytest.mark.parametrize("ranks", [*simulated(2), *gloo(2)], ids=str)
@pytest.mark.parametrize("case", BAD)
def test_every_rank_names_the_parameters_of_all_with_the_first_bad_index(case: str, ranks: Ranks) -> None:
    for lines in ranks.run(reported_of, case):
        assert lines == [line_of(*line, count_of(case)) for line in BAD[case][1]]


def test_a_finite_tree_passes_whatever_is_in_its_padding() -> None:
    for axes in ({"shard": 3}, SWAPPED):
        mesh = fs.simulated_mesh(axes)
        tree = spoiled(mesh, {}, "float32", ignored=["b"], align_bytes=64)
        assert any(x.isnan().any() for x in with_padding(tree, NAN).values())
        for clean in (tree, some_none(tree), with_padding(tree, NAN)):
            fs.debug.assert_finite(clean)


@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "complex", "mixed"])
def test_every_dtype_is_looked_at(dtypes: str) -> None:
    shown = "(nan+0j)" if dtypes == "complex" else "nan"
    lines = reported(spoiled(fs.simulated_mesh(2), {"b.w": {(5,): NAN}}, dtypes), "tree")
    assert len(lines) == 1
    assert lines[0].startswith("'b.w' on rank ")
    assert lines[0].endswith(f" values are not finite, the first is {shown} at [5]")


def reported_of_one_replica(mesh: fs.Mesh) -> list[str]:
    alone = spoiled(mesh, {})
    row = alone["c"][1, 0] if mesh.is_simulated else alone["c"]  # one replica of the second shard, which is rank 2
    if mesh.is_simulated or mesh.rank == 2:
        row[0] = NAN
    return reported(alone)


@pytest.mark.parametrize("ranks", [*simulated(SWAPPED), *gloo(SWAPPED)], ids=str)
def test_a_replica_that_differs_is_named_alone(ranks: Ranks) -> None:
    for lines in ranks.run(reported_of_one_replica):
        assert lines == [line_of("c.w", 2, 263, "nan at [8, 16]")]


def test_inside_spmd_the_error_says_to_call_it_outside() -> None:
    mesh = fs.simulated_mesh(2)
    text = refused(mesh.spmd(lambda tree: fs.debug.assert_finite(tree, "grads")), spoiled(mesh, {}))
    assert text == (
        "RuntimeError: assert_finite: grads: inside spmd the values of simulated ranks are not known yet. Return the "
        "tree from the function, and call assert_finite outside."
    )


def test_a_tree_that_does_not_fit_the_layout_is_refused() -> None:
    tree = spoiled(fs.simulated_mesh(2), {})
    for wrong in (dict(tree), fs.gather(tree)):
        assert refused(fs.debug.assert_finite, wrong).startswith("TypeError: assert_finite: tree")
    cut = fs.Sharded({key: x[..., :1] for key, x in tree.items()}, tree.layout)
    assert refused(fs.debug.assert_finite, cut, "cut").startswith(
        "ValueError: assert_finite: cut: 4 problems\n  'a': got shape"
    )


@pytest.mark.parametrize("axes", [{"shard": 3}, {"replicate": 2, "shard": 2}], ids=str)
def test_all_ranks_know_whether_all_values_are_finite(axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh(axes)
    for bad in (NAN, INF, -INF):
        for ignored in ([], ["b"]):
            clean = spoiled(mesh, {}, "float32", ignored=ignored, align_bytes=64)
            with count_collectives() as seen:
                finite = mesh.spmd(fs.all_finite)(with_padding(clean, bad))
            assert finite.shape == tuple(axes.values())
            assert finite.dtype == torch.bool
            assert finite.all()
            assert [(c.kind, c.axis, c.numel) for c in seen.issued] == [
                ("pmax", name, 1) for name, size in axes.items() if size > 1
            ]
            for rank in range(mesh.size):  # one rank alone, even of replicas that should be equal
                one = spoiled(mesh, {}, "float32", ignored=ignored, align_bytes=64)
                one["a"].flatten(0, len(axes) - 1)[rank, 0] = bad
                assert not mesh.spmd(fs.all_finite)(one).any()
