"""Norms, clipping and their derivatives: those of whole tensors by torch itself, with one number sent."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp
from torch.nn.utils import get_total_norm

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.laws.tasks import whole
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
    Bad,
    clipped_by_torch,
    first,
    sharded,
    spoiled_values,
    tolerance,
    total,
    values,
    with_padding,
)
from tests.support.ranks import HYBRID, Ranks, gloo, simulated
from tests.support.refusals import refused
from tests.support.steps import copied

every_power = pytest.mark.parametrize("p", POWERS)
MAX_NORMS = (1.0, 0.0, 1e6)


def norms_of(mesh: fs.Mesh, dtypes: str, ignored: str, p: float) -> Any:
    """The norm, the norms by name, and clipped trees, of a tree whose padding is NaN."""
    tree = with_padding(sharded(mesh, dtypes, ignored), NAN)
    before = copied(tree)

    def norms(tree: fs.Sharded) -> Any:
        clipped, again = zip(*(fs.clip_by_global_norm(tree, most, p) for most in MAX_NORMS), strict=True)
        return (fs.global_norm(tree, p), *again), fs.debug.param_norms(tree, p), clipped

    found, by_name, clipped = mesh.spmd(norms)(tree)
    if mesh.is_simulated:
        inside = [first(x, mesh) for x in found], {name: first(x, mesh) for name, x in by_name.items()}
        outside = norms(tree)
        assert_trees_close(([*outside[0]], outside[1]), inside, rtol=2e-6, atol=0)
        assert_trees_close([with_padding(x, NAN) for x in outside[2]], [with_padding(x, NAN) for x in clipped])
    assert_trees_close(tree, before, rtol=0, atol=0)
    assert all({key: x.dtype for key, x in each.items()} == {k: x.dtype for k, x in tree.items()} for each in clipped)
    return torch.stack(found, -1), by_name, [fs.gather(each, lazy=False) for each in clipped]


@pytest.mark.parametrize(
    ("dtypes", "ignored", "ranks"),
    [
        *((dtypes, "b whole", ranks) for dtypes in DTYPES for ranks in (*simulated(3), *gloo(HYBRID))),
        *(("mixed", ignored, ranks) for ignored in ("sharded", "all whole") for ranks in simulated(HYBRID)),
    ],
    ids=str,
)
@every_power
def test_norms_and_clipping_are_those_of_torch_and_bitwise_the_same_on_every_rank(
    p: float, dtypes: str, ignored: str, ranks: Ranks
) -> None:
    given, dtype = values(dtypes), DTYPES[dtypes][1]
    expected, each = total(given, p, dtype), {}
    for name, x in given.items():
        own = F64 if x.dtype in (F64, torch.complex128) else F32
        each[name] = total({name: x}, p, own) if x.numel() else torch.zeros((), dtype=own)
    results = ranks.run(norms_of, dtypes, ignored, p)
    found, by_name, clipped = results[0]
    assert_trees_close(found, expected.expand(4), **tolerance(dtypes))
    assert list(by_name) == list(each)
    assert_trees_close(by_name, each, rtol=2e-6, atol=0)
    for most, full in zip(MAX_NORMS, clipped, strict=True):
        by_torch = clipped_by_torch(given, most, expected)
        close: Any = tolerance(dtypes) if dtypes == "float64" else {}
        assert_trees_close(dict(full), {**by_torch, **FROZEN}, **close)
    assert_trees_close(results, results[:1] * ranks.size, rtol=0, atol=0)


# Values that are not finite, at the ends of parameters and of the shards of 264 elements, of which [8, 15] is the last.
NOT_FINITE: list[Bad] = [
    {},
    {"a.w": {(2, 3): NAN}},
    {"a.w": {(0, 0): INF}, "c.w": {(16, 30): -INF}},
    {"c.w": {(8, 15): NAN}},
    {"b.s": {(): -INF}},
    {"c.w": {(16, 30): NAN}},
]


def where_bad(mesh: fs.Mesh) -> tuple[list[list[str]], list[tuple[Tensor, Tensor, fs.Full]]]:
    """The names of parameters that are not finite, in each dtype; and norms and clipped trees."""
    large = {(0,): 1e30}  # whose square is infinite in float32
    named = []
    for dtypes, bad in product(("float32", "bfloat16", "complex"), NOT_FINITE):
        tree = with_padding(sharded(mesh, dtypes, bad={"a.b": large, **bad}, align_bytes=64), NAN)
        named.append([name for name, x in fs.debug.param_norms(tree, INF).items() if not x.isfinite()])
    results = []
    for bad, p in product(NOT_FINITE, POWERS):
        tree = with_padding(sharded(mesh, bad=bad, align_bytes=64), NAN)
        clipped, norm = mesh.spmd(lambda tree, p=p: fs.clip_by_global_norm(tree, 1.0, p))(tree)
        results.append((norm, mesh.spmd(fs.all_finite)(tree), fs.gather(clipped, lazy=False)))
    return named, results


@pytest.mark.parametrize("ranks", [*simulated(2), *gloo(2)], ids=str)
def test_every_rank_names_the_parameters_that_are_not_finite_and_clips_as_torch(ranks: Ranks) -> None:
    for named, results in ranks.run(where_bad):
        assert named == [[*bad] for bad in NOT_FINITE] * 3
        for (bad, p), (norm, finite, clipped) in zip(product(NOT_FINITE, POWERS), results, strict=True):
            given = {n: x for n, x in spoiled_values(bad).items() if n not in FROZEN and x.numel()}
            total_norm = get_total_norm([*given.values()], p)
            assert_trees_close(norm, total_norm)
            expected = clipped_by_torch(given, 1.0, total_norm)
            assert_trees_close({name: clipped[name] for name in expected}, expected)
            assert finite.item() == (not bad)


def test_tied_parameters_count_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    params = fs.shard(model, fs.plan(model, fs.simulated_mesh(2)))
    assert_trees_close(fs.global_norm(params), get_total_norm([p.detach() for p in model.parameters()]))
    assert list(fs.debug.param_norms(params)) == ["a.weight", "a.bias", "b.bias"]


@every_power
def test_missing_gradients_and_integers_count_nothing_and_the_norm_of_nothing_is_zero(p: float) -> None:
    mesh = fs.simulated_mesh(HYBRID)
    full = sharded(mesh)
    tree = fs.Sharded({key: None if key.startswith("c") else x for key, x in full.items()}, full.layout)
    there = {name: x for name, x in values().items() if not name.startswith("c")}
    nothing = fs.shard({"no": torch.zeros(0, 3), **FROZEN}, fs.plan({"no": torch.zeros(0, 3), **FROZEN}, mesh))
    for given, expected in ((tree, total(there, p, F64)), (nothing, torch.tensor(0.0))):
        for norm in (fs.global_norm(given, p), first(mesh.spmd(lambda tree: fs.global_norm(tree, p))(given), mesh)):
            assert_trees_close(norm, expected, **tolerance("float64"))
    clipped, _ = fs.clip_by_global_norm(tree, 0.1, p)
    assert [key for key, x in clipped.items() if x is None] == [key for key, x in tree.items() if x is None]
    assert all(clipped[key] is tree[key] for key, b in tree.layout.buffers.items() if not b.differentiable)


@pytest.mark.parametrize("ignored", IGNORED)
@every_power
def test_one_number_is_sent_over_the_shard_axis_and_none_over_replicas(ignored: str, p: float) -> None:
    mesh = fs.simulated_mesh(HYBRID)
    tree, kind, alone = sharded(mesh, "mixed", ignored), "pmax" if p == INF else "psum", ignored == "all whole"
    verbs: dict[Any, int] = {
        fs.global_norm: 1,
        (lambda tree, p: fs.clip_by_global_norm(tree, 1.0, p)): 1,
        fs.debug.param_norms: len(SHAPES) - (3 if ignored == "b whole" else 0),
    }
    for verb, number in verbs.items():
        with count_collectives() as seen:
            mesh.spmd(partial(verb, p=p))(tree)
        expected = [] if alone else [(kind, "shard", number, 4 * number)]
        assert [(c.kind, c.axis, c.numel, c.nbytes) for c in seen.issued] == expected


def test_a_long_sum_in_float32_keeps_its_digits() -> None:
    mesh = fs.simulated_mesh(2)
    given = {"w": torch.full((1_000_003,), 0.1), "v": torch.full((77_777,), 0.3)}
    tree = fs.shard(given, fs.plan(given, mesh))
    exact = {name: x.double().norm().float() for name, x in given.items()}
    assert_trees_close(fs.debug.param_norms(tree), exact, rtol=1e-6, atol=0)
    together = torch.cat([x.double() for x in given.values()]).norm().float()
    assert_trees_close(fs.global_norm(tree), together, rtol=1e-6, atol=0)


def test_outside_spmd_gradients_that_are_wider_than_parameters_are_not_rounded() -> None:
    mesh, given = fs.simulated_mesh(3), {"w": torch.full((7,), 1e5)}
    narrow = fs.plan({"w": torch.zeros(7, dtype=torch.float16)}, mesh, align_bytes=0)
    tree = fs.Sharded(fs.shard(given, fs.plan(given, mesh, align_bytes=0)), narrow)
    found = fs.global_norm(tree), fs.debug.param_norms(tree)["w"], fs.curvature.to_vector(tree)
    assert_trees_close(found, (given["w"].norm(), given["w"].norm(), given["w"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("verb", [fs.global_norm, fs.debug.param_norms])
def test_a_wrong_power_or_a_wrong_tree_is_refused(verb: Any) -> None:
    tree = sharded(fs.simulated_mesh(2))
    for p in (0.5, NAN):
        assert f"p: got {p}, expected 1 or more, or float('inf')" in refused(verb, tree, p)
    assert "got Full, expected a Sharded; torch.nn.utils.get_total_norm" in refused(verb, fs.gather(tree))
    cut = fs.Sharded({key: x[..., :1] for key, x in tree.items()}, tree.layout)
    assert "problems\n  'a': got shape (2, 1), torch.float64, expected (2, 11)" in refused(verb, cut)


# --- derivatives


def vector_norm(tensors: Mapping[str, Tensor], p: float) -> Tensor:
    return torch.linalg.vector_norm(torch.cat([x.flatten() for x in tensors.values()]), p)


@pytest.mark.parametrize(("axes", "ignored"), [({"shard": 5}, "b whole"), (HYBRID, "sharded")], ids=str)
@every_power
def test_derivatives_are_those_of_the_norm_of_whole_tensors(axes: dict[str, int], ignored: str, p: float) -> None:
    """Padding, which is NaN here, has no gradient, and its tangent does not count."""
    mesh, given, v = fs.simulated_mesh(axes), values(), values(seed=1)
    layout = fs.plan(given, mesh, ignored=IGNORED[ignored], align_bytes=64)
    assert any(sum(buffer.split_sizes[::2]) for buffer in layout.buffers.values())
    tree, direction = (with_padding(fs.shard(x, layout), NAN) for x in (given, v))
    norm, plain = partial(fs.global_norm, p=p), partial(vector_norm, p=p)

    def once(gradient: fs.Sharded) -> dict[str, Tensor]:
        """Each rank whose result depends on a part adds to its gradient: all of them, or the one with a whole copy."""
        assert_trees_close(with_padding(gradient, 0.0), gradient, rtol=0, atol=0)
        number = {slot.name: buffer.num_shards for buffer in layout.buffers.values() for slot in buffer.slots}
        return {name: x / number[name] for name, x in whole(gradient, axes.get("replicate", 1)).items()}

    assert_trees_close(once(mesh.spmd(grad(norm))(tree)), grad(plain)(given), rtol=1e-11, atol=1e-13)
    tangent = mesh.spmd(lambda tree, v: jvp(norm, (tree,), (v,))[1])(tree, direction)
    assert_trees_close(first(tangent, mesh), jvp(plain, (given,), (v,))[1], rtol=1e-11, atol=1e-13)
    second = mesh.spmd(lambda tree, v: jvp(grad(norm), (tree,), (v,))[1])(tree, direction)
    assert_trees_close(once(second), jvp(grad(plain), (given,), (v,))[1], rtol=1e-10, atol=1e-12)


@every_power
def test_outside_spmd_every_copy_has_the_gradient_of_the_one_norm(p: float) -> None:
    mesh, given = fs.simulated_mesh(HYBRID), values()
    tree = fs.shard(given, fs.plan(given, mesh, ignored=["b"]))
    gradient = grad(lambda tree: fs.global_norm(tree, p))(tree)
    expected = fs.shard(grad(lambda tensors: vector_norm(tensors, p))(given), tree.layout)
    assert_trees_close(gradient, expected, rtol=1e-12, atol=1e-14)


@every_power
def test_at_zero_every_derivative_is_zero_and_not_nan(p: float) -> None:
    mesh, dtypes = fs.simulated_mesh(3), "complex"
    given = {name: torch.zeros_like(x) for name, x in values(dtypes).items()}
    tree = fs.shard(given, fs.plan(given, mesh, ignored=["b"]))
    for run in (lambda fn: fn, mesh.spmd):
        gradient = run(grad(lambda tree: fs.global_norm(tree, p)))(tree)
        assert_trees_close(gradient, tree, rtol=0, atol=0)
        clipped = run(lambda tree: fs.clip_by_global_norm(tree, 1.0, p)[0])(tree)
        assert_trees_close(clipped, tree, rtol=0, atol=0)
    partly = {**given, "a.w": values(dtypes)["a.w"]}
    gradient = mesh.spmd(grad(lambda tree: fs.global_norm(tree, p)))(fs.shard(partly, tree.layout))
    for name, x in fs.gather(gradient).items():
        assert x.isfinite().all()
        assert (name == "a.w") == bool(x.any())
