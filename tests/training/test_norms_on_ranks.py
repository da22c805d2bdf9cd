"""Norms, clipping and the search for NaN on gloo ranks: what simulated ranks, torch and FSDP2 compute."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import grad, jvp
from torch.nn.utils import clip_grad_norm_

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from functorch_shard.training.finite import all_finite
from tests.support.models import loss_of, two_layers
from tests.support.pool import run_ranks
from tests.training.test_finite import BAD, NUMEL, count_of, line_of, reported
from tests.training.test_finite import sharded as spoiled
from tests.training.test_norms import (
    DTYPES,
    F32,
    F64,
    IGNORED,
    INF,
    NAN,
    POWERS,
    TOLERANCE,
    sharded,
    some_none,
    with_padding,
)

AXES: list[dict[str, int]] = [{"shard": 2}, {"replicate": 2, "shard": 2}]
Tree = Any


def results_on(mesh: fs.Mesh) -> dict[str, Any]:
    """Every verb on every tree: rows of all simulated ranks, or what this real rank has."""
    results = {}
    for dtypes in DTYPES if mesh.size == 2 else ("float64", "mixed"):
        for ignored in IGNORED:
            tree = with_padding(sharded(mesh, dtypes, ignored), NAN)
            for p in POWERS:
                results[f"{dtypes}, {ignored}, {p}"] = mesh.spmd(lambda tree, p=p: verbs(tree, p))(tree)
    return results


def verbs(tree: fs.Sharded, p: float) -> dict[str, Any]:
    part, _ = fs.partition(tree)
    norm = lambda tree: fs.global_norm(tree, p)  # noqa: E731
    clipped, before = fs.clip_by_global_norm(tree, 1.0, p)
    return {
        "norm": norm(tree),
        "norm of some": norm(some_none(tree)),
        "before": before,
        "clipped": dict(with_zero_padding(clipped)),
        "by name": fs.debug.param_norms(tree, p),
        "by name of some": fs.debug.param_norms(some_none(tree), p),
        "gradient": dict(grad(norm)(part)),
        "tangent": jvp(norm, (part,), (part,))[1] + torch.zeros(()),  # torch's ZeroTensor cannot be pickled
        "finite": all_finite(tree),
    }


def with_zero_padding(tree: fs.Sharded) -> fs.Sharded:
    """NaN there would stay: clipping multiplies it."""
    zero = lambda x: torch.where(x.isnan(), 0, x) if x.is_floating_point() or x.is_complex() else x  # noqa: E731
    return fs.Sharded({key: zero(x) for key, x in tree.items()}, tree.layout)


def results_on_this_rank(axes: dict[str, int]) -> tuple[dict[str, Any], list[list[Any]]]:
    mesh = fs.init_mesh(axes)
    return results_on(mesh), issued_on(mesh)


def issued_on(mesh: fs.Mesh) -> list[list[Any]]:
    issued = []
    for ignored in IGNORED:
        tree = sharded(mesh, "mixed", ignored)
        for p in (2.0, INF):
            for verb in (fs.global_norm, lambda tree, p: fs.clip_by_global_norm(tree, 1.0, p), fs.debug.param_norms):
                with count_collectives() as seen:
                    mesh.spmd(lambda tree, p=p, verb=verb: verb(tree, p))(tree)
                issued.append(seen.issued)
    return issued


@cache
def real_results(axes: tuple[tuple[str, int], ...]) -> list[Any]:
    return run_ranks(results_on_this_rank, fs.simulated_mesh(dict(axes)).size, dict(axes))


def row(tree: Any, rank: int, num_axes: int) -> Any:
    if isinstance(tree, dict):
        return {key: row(x, rank, num_axes) for key, x in tree.items()}
    return tree.flatten(0, num_axes - 1)[rank]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_real_ranks_compute_what_simulated_ones_do(axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh(axes)
    simulated = results_on(mesh)
    for rank, (results, _) in enumerate(real_results(tuple(axes.items()))):
        for case, expected in simulated.items():
            tolerance = TOLERANCE[F64] if case.startswith("float64") else {**TOLERANCE[F32], "atol": 1e-7}
            halves = "bfloat16" in case or "mixed" in case  # where the last digit of a norm may round to another one
            for key, wanted in row(expected, rank, len(axes)).items():
                rounded = halves and key in ("clipped", "gradient")
                one_digit = {"rtol": 2.0**-7, "atol": 1e-7} if rounded else tolerance
                assert_trees_close({case: results[case][key]}, {case: wanted}, **one_digit)
            assert results[case]["finite"]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_rank_has_bitwise_the_same_norms(axes: dict[str, int]) -> None:
    first, *others = [results for results, _ in real_results(tuple(axes.items()))]
    shared = ("norm", "norm of some", "before", "by name", "by name of some")
    for case in first:
        for other in others:
            for key in shared:
                assert_trees_close({key: other[case][key]}, {key: first[case][key]}, rtol=0, atol=0)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_real_ranks_send_what_simulated_ones_do(axes: dict[str, int]) -> None:
    simulated = issued_on(fs.simulated_mesh(axes))
    assert [len(issued) for issued in simulated] == [1] * 12 + [0] * 6  # nothing where all is whole
    assert {c.axis for issued in simulated for c in issued} == {"shard"}
    assert [issued for _, issued in real_results(tuple(axes.items()))] == [simulated] * fs.simulated_mesh(axes).size


def nonfinite_on_this_rank() -> list[Any]:
    """Norms of trees in which the last rank alone has a NaN or an infinity."""
    mesh, results = fs.init_mesh(), []
    for bad in (NAN, INF, -INF):
        tree = spoiled(mesh, {"c.w": {(16, 30): bad}})
        for p in POWERS:
            clipped, norm = fs.clip_by_global_norm(tree, 1.0, p)
            results.append((norm, dict(fs.gather(clipped, lazy=False)), all_finite(tree)))
    return results


def test_a_nan_of_the_last_rank_reaches_all_ranks_as_in_torch() -> None:
    cases = [(bad, p) for bad in (NAN, INF, -INF) for p in POWERS]
    tree = {bad: spoiled(fs.simulated_mesh(2), {"c.w": {(16, 30): bad}}) for bad in (NAN, INF, -INF)}
    for results in run_ranks(nonfinite_on_this_rank, 2):
        for (bad, p), (norm, clipped, finite) in zip(cases, results, strict=True):
            given = {n: x for n, x in fs.gather(tree[bad]).items() if x.is_floating_point() and x.numel()}
            params = {name: nn.Parameter(torch.zeros_like(x)) for name, x in given.items()}
            for name, param in params.items():
                param.grad = given[name].clone()
            assert_trees_close(norm, clip_grad_norm_(params.values(), 1.0, p))
            assert_trees_close({n: clipped[n] for n in params}, {n: param.grad for n, param in params.items()})
            assert not finite


# --- FSDP2


def batch() -> tuple[Tensor, Tensor]:
    return torch.arange(20.0).view(4, 5).sin(), torch.arange(12.0).view(4, 3).cos()


def fsdp2_on_this_rank() -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    mesh, results = fs.init_mesh(), []
    x, y = mesh.split(batch())
    for p in POWERS:
        for max_norm in (1e-2, 1e3):
            theirs = two_layers()
            for layer in (theirs[0], theirs[2], theirs):
                fully_shard(layer)
            ((theirs(x) - y) ** 2).mean().backward()
            total: Any = clip_grad_norm_(theirs.parameters(), max_norm, p)
            sharded_grads: Any = {name: param.grad for name, param in theirs.named_parameters()}
            expected = {name: x.full_tensor() for name, x in sharded_grads.items()}

            ours = two_layers()
            params = fs.shard(ours, fs.plan(ours, mesh))
            grads = fs.grad(lambda params, model, *data: loss_of(model, fs.gather(params), *data))(params, ours, x, y)
            clipped, norm = fs.clip_by_global_norm(grads, max_norm, p)
            results.append((norm, total.full_tensor(), dict(fs.gather(clipped, lazy=False)), expected))
    return results


def test_clipping_is_that_of_fsdp2_on_the_same_ranks() -> None:
    for results in run_ranks(fsdp2_on_this_rank, 2):
        assert len(results) == 2 * len(POWERS)
        for norm, their_norm, clipped, expected in results:
            assert_trees_close(norm, their_norm, rtol=1e-6, atol=0)
            assert_trees_close(clipped, expected, rtol=1e-5, atol=1e-8)
        scaled = [clipped["0.weight"].norm() for _, _, clipped, _ in results[:2]]
        assert scaled[0] < 0.1 * scaled[1]  # one was clipped, one was not


# --- assert_finite


def reported_on_this_rank(axes: dict[str, int]) -> dict[str, Any]:
    mesh = fs.init_mesh(axes)
    results: dict[str, Any] = {}
    for case, (bad, _) in BAD.items():
        tree = spoiled(mesh, bad)
        results[case] = reported(tree)
        results[f"{case}, lazy"] = reported(fs.gather(tree))
    results["whole"] = reported(spoiled(mesh, {"b.w": {(3,): NAN, (4,): NAN}}, ignored=["b"]))
    alone = spoiled(mesh, {})
    if mesh.rank == mesh.size - 1:
        alone["a"][0] = INF
    results["one rank"] = reported(alone)
    results["one rank, before"] = reported(before_reduction(mesh))
    with count_collectives() as seen:
        clean = with_padding(spoiled(mesh, {}, "float32", align_bytes=64), NAN)
        fs.debug.assert_finite(clean)
        fs.debug.assert_finite(some_none(clean))
        fs.debug.assert_finite(fs.gather(spoiled(mesh, {}), lazy=False))
    results["sent"] = [(c.kind, c.nbytes) for c in seen.issued if c.kind == "exchange" and c.nbytes < 32]
    dist.barrier()  # and afterwards the ranks are still in step
    return results


def before_reduction(mesh: fs.Mesh) -> fs.Full:
    """This rank's full gradients, of which the last rank's alone has overflowed."""
    full = fs.materialize(fs.gather(spoiled(mesh, {})))
    if mesh.rank == mesh.size - 1:
        full["a.w"][1, 1] = INF
    return full


@cache
def all_reported(axes: tuple[tuple[str, int], ...]) -> list[Any]:
    return run_ranks(reported_on_this_rank, fs.simulated_mesh(dict(axes)).size, dict(axes))


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_rank_raises_the_same_error(axes: dict[str, int]) -> None:
    first, *others = all_reported(tuple(axes.items()))
    assert others == [first] * (fs.simulated_mesh(axes).size - 1)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_what_is_not_finite_is_found_on_real_ranks_as_on_simulated_ones(axes: dict[str, int]) -> None:
    mesh, results = fs.simulated_mesh(axes), all_reported(tuple(axes.items()))[0]
    every, last = range(mesh.size), mesh.size - 1
    for case, (bad, lines) in BAD.items():
        assert sorted(results[case]) == sorted(reported(spoiled(mesh, bad)))
        whole = [line_of(n, r, NUMEL[n], first, count_of(case)) for r in every for n, _, _, first in lines]
        assert results[f"{case}, lazy"] == whole
    assert results["whole"] == [line_of("b.w", rank, 7, "nan at [3]", 2) for rank in every]
    # the shard of 11 of the last rank begins with element 11 of a.w
    assert results["one rank"] == [line_of("a.w", last, 4, "inf at [2, 1]")]
    assert results["one rank, before"] == [line_of("a.w", last, 15, "inf at [1, 1]")]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_when_all_is_well_eight_bytes_are_sent(axes: dict[str, int]) -> None:
    for results in all_reported(tuple(axes.items())):
        once = [("exchange", 8), ("exchange", 16)][: len(axes)]  # the second axis passes on what the first gave
        assert results["sent"] == once * 3
