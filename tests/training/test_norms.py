"""Norms on simulated and on gloo ranks: those of whole tensors by torch itself, with one number sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.norms import (
    DTYPES,
    F32,
    F64,
    FROZEN,
    IGNORED,
    INF,
    NAN,
    POWERS,
    SHAPES,
    TOLERANCE,
    first,
    padded,
    sharded,
    some_none,
    tolerance,
    total,
    values,
    with_padding,
)
from tests.support.ranks import HYBRID, Ranks, gloo, simulated
from tests.support.refusals import refused

every_power = pytest.mark.parametrize("p", POWERS)


# --- the norm


def norms_of(mesh: fs.Mesh, dtypes: str, ignored: str, p: float) -> Any:
    """The norm, and the norms by name, of a tree whose padding is NaN."""
    tree = with_padding(sharded(mesh, dtypes, ignored), NAN)
    norms = lambda tree: (fs.global_norm(tree, p), fs.debug.param_norms(tree, p))  # noqa: E731
    norm, by_name = mesh.spmd(norms)(tree)
    if mesh.is_simulated:
        inside = first(norm, mesh), {name: first(x, mesh) for name, x in by_name.items()}
        assert_trees_close(norms(tree), inside, rtol=2e-6, atol=0)
    return norm, by_name


@pytest.mark.parametrize(
    ("dtypes", "ignored", "ranks"),
    [
        *((dtypes, "b whole", ranks) for dtypes in DTYPES for ranks in (*simulated(3), *gloo(HYBRID))),
        *(("mixed", ignored, ranks) for ignored in ("sharded", "all whole") for ranks in simulated(HYBRID)),
    ],
    ids=str,
)
@every_power
def test_norms_are_those_of_the_whole_tensors_and_bitwise_the_same_on_every_rank(
    p: float, dtypes: str, ignored: str, ranks: Ranks
) -> None:
    expected, each = total(values(dtypes), p, DTYPES[dtypes][1]), {}
    for name, x in values(dtypes).items():
        dtype = F64 if x.dtype in (F64, torch.complex128) else F32
        each[name] = total({name: x}, p, dtype) if x.numel() else torch.zeros((), dtype=dtype)
    results = ranks.run(norms_of, dtypes, ignored, p)
    norm, by_name = results[0]
    assert_trees_close(norm, expected, **tolerance(dtypes))
    assert list(by_name) == list(each)
    assert_trees_close(by_name, each, rtol=2e-6, atol=0)
    assert_trees_close(results, results[:1] * ranks.size, rtol=0, atol=0)


def test_tied_parameters_count_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    mesh = fs.simulated_mesh(2)
    params = fs.shard(model, fs.plan(model, mesh))
    expected = get_total_norm([p.detach() for p in model.parameters()])
    assert len(list(model.parameters())) == 3
    assert_trees_close(fs.global_norm(params), expected)
    assert_trees_close(mesh.spmd(fs.global_norm)(params)[1], expected)
    assert list(fs.debug.param_norms(params)) == ["a.weight", "a.bias", "b.bias"]


@every_power
def test_missing_gradients_and_integers_count_nothing(p: float) -> None:
    mesh = fs.simulated_mesh(HYBRID)
    tree = some_none(sharded(mesh))
    there = {name: x for name, x in values().items() if not name.startswith("c")}
    for norm in (fs.global_norm(tree, p), first(mesh.spmd(lambda tree: fs.global_norm(tree, p))(tree), mesh)):
        assert_trees_close(norm, total(there, p, F64), **TOLERANCE[F64])
    clipped, _ = fs.clip_by_global_norm(tree, 0.1, p)
    assert [key for key, x in clipped.items() if x is None] == [key for key, x in tree.items() if x is None]
    integers = [key for key, buffer in tree.layout.buffers.items() if not buffer.differentiable]
    assert len(integers) == 2
    assert all(clipped[key] is tree[key] for key in integers)


@every_power
def test_the_norm_of_nothing_is_zero(p: float) -> None:
    mesh = fs.simulated_mesh(2)
    for given in (FROZEN, {"no": torch.zeros(0, 3)}, {"no": torch.zeros(0, 3), **FROZEN}):
        tree = fs.shard(given, fs.plan(given, mesh))
        for norm in (fs.global_norm(tree, p), mesh.spmd(lambda tree: fs.global_norm(tree, p))(tree)[1]):
            assert_trees_close(norm, torch.tensor(0.0))
    none = fs.Sharded(dict.fromkeys(tree), tree.layout)
    assert fs.global_norm(none, p) == 0
    assert fs.debug.param_norms(none, p) == {}


# --- padding


@every_power
def test_padding_never_reaches_the_norm(p: float) -> None:
    mesh = fs.simulated_mesh(3)
    tree = padded(mesh)
    dirty = with_padding(tree, NAN)
    for run in (lambda fn: fn, mesh.spmd):
        norms = run(lambda tree: (fs.global_norm(tree, p), fs.debug.param_norms(tree, p)))
        assert_trees_close(norms(dirty), norms(tree), rtol=0, atol=0)
        clip = run(lambda tree: fs.clip_by_global_norm(tree, 0.5, p))
        (clipped, _), (expected, _) = clip(dirty), clip(tree)
        assert_trees_close(with_padding(clipped, 0.0), expected, rtol=0, atol=0)


# --- what is sent


@pytest.mark.parametrize("ignored", IGNORED)
@every_power
def test_one_number_is_sent_over_the_shard_axis_and_none_over_replicas(ignored: str, p: float) -> None:
    axes = {"replicate": 2, "shard": 2}
    mesh = fs.simulated_mesh(axes)
    tree = sharded(mesh, "mixed", ignored)
    kind, anything = "pmax" if p == INF else "psum", axes.get("shard", 1) > 1 and ignored != "all whole"
    for norm in (lambda tree: fs.global_norm(tree, p), lambda tree: fs.clip_by_global_norm(tree, 1.0, p)):
        with count_collectives() as seen:
            mesh.spmd(norm)(tree)
        expected = [(kind, "shard", 1, 4)] if anything else []
        assert [(c.kind, c.axis, c.numel, c.nbytes) for c in seen.issued] == expected
    with count_collectives() as seen:
        mesh.spmd(lambda tree: fs.debug.param_norms(tree, p))(tree)
    num_sharded = len(SHAPES) - (3 if ignored == "b whole" else 0)
    expected = [(kind, "shard", num_sharded, 4 * num_sharded)] if anything else []
    assert [(c.kind, c.axis, c.numel, c.nbytes) for c in seen.issued] == expected


# --- norms by name


def test_a_long_sum_in_float32_keeps_its_digits() -> None:
    mesh = fs.simulated_mesh(2)
    given = {"w": torch.full((1_000_003,), 0.1), "v": torch.full((77_777,), 0.3)}
    tree = fs.shard(given, fs.plan(given, mesh))
    exact = {name: x.double().norm().float() for name, x in given.items()}
    assert_trees_close(
        mesh.spmd(fs.debug.param_norms)(tree), {n: x.expand(2) for n, x in exact.items()}, rtol=1e-6, atol=0
    )
    together = torch.cat([x.double() for x in given.values()]).norm().float()
    assert_trees_close(mesh.spmd(fs.global_norm)(tree), together.expand(2), rtol=1e-6, atol=0)


# --- refusals


@pytest.mark.parametrize(
    "verb", [fs.global_norm, fs.debug.param_norms, lambda tree, p=2.0: fs.clip_by_global_norm(tree, 1, p)]
)
def test_a_wrong_power_or_a_wrong_tree_is_refused(verb: Any) -> None:
    tree = sharded(fs.simulated_mesh(2))
    for p in (0.5, 0.0, -1.0, NAN, -INF):
        assert f"p: got {p}, expected 1 or more, or float('inf')" in refused(verb, tree, p)
    assert "got Full, expected a Sharded; torch.nn.utils.get_total_norm takes whole tensors." in refused(
        verb, fs.gather(tree)
    )
    assert "got dict, expected a Sharded." in refused(verb, dict(tree))
    cut = fs.Sharded({key: x[..., :1] for key, x in tree.items()}, tree.layout)
    assert "problems\n  'a': got shape (2, 1), torch.float64, expected (2, 11)" in refused(verb, cut)
