"""What is not finite is found by name, and all ranks know of it."""

from __future__ import annotations

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import count_collectives
from tests.support.norms import INF, NAN, Bad, spoiled, with_padding
from tests.support.ranks import Ranks, gloo, simulated

# Values that are not finite, at the ends of parameters and of the shards of 264 elements, of which [8, 15] is the last.
BAD: list[Bad] = [
    {},
    {"a.w": {(2, 3): NAN}},
    {"a.w": {(0, 0): INF}, "c.w": {(16, 30): -INF}},
    {"c.w": {(8, 15): NAN}},
    {"b.s": {(): -INF}},
]


def not_finite(mesh: fs.Mesh, dtypes: str = "float32") -> list[list[str]]:
    """The names of parameters, for each of ``BAD``, as this rank or all simulated ranks find them."""
    large = {(0,): 1e30}  # whose square is infinite in float32
    trees = [with_padding(spoiled(mesh, {"a.b": large, **bad}, dtypes, align_bytes=64), NAN) for bad in BAD]
    return [[name for name, x in fs.debug.param_norms(tree, INF).items() if not x.isfinite()] for tree in trees]


@pytest.mark.parametrize("ranks", [*simulated(2), *gloo(2)], ids=str)
def test_every_rank_names_the_parameters_that_are_not_finite(ranks: Ranks) -> None:
    for dtypes in ("float32", "bfloat16", "complex"):
        for found in ranks.run(not_finite, dtypes):
            assert found == [[*bad] for bad in BAD]


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
