"""Norms on simulated ranks: those of the whole tensors by torch itself, with one number sent, and with derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp
from torch.nn.utils import clip_grad_norm_, get_total_norm

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.gradients import Data, whole
from tests.support.models import awkward, loss_of
from tests.support.reference import data_parallel_loss
from tests.support.refusals import refused
from tests.support.steps import copied

INF, NAN = float("inf"), float("nan")
POWERS = [1.0, 2.0, 2.5, 3.0, INF]
AXES: list[dict[str, int]] = [{"shard": n} for n in (1, 2, 3, 5, 8)]
AXES += [{"replicate": 2, "shard": 2}, {"shard": 3, "replicate": 2}, {"replicate": 2}]

# Smaller than the number of ranks, a matrix row cut in two, a scalar, an empty tensor, a prime.
SHAPES: dict[str, tuple[int, ...]] = {
    "a.w": (3, 5),
    "a.b": (5,),
    "b.s": (),
    "b.no": (0, 3),
    "b.w": (7,),
    "c.w": (17, 31),
}
FROZEN = {"b.steps": torch.tensor([3, -7]), "b.mask": torch.tensor([True, False, True])}
F64, F32, BF16, C64 = torch.float64, torch.float32, torch.bfloat16, torch.complex64
# The dtypes of a tree, one parameter after the other, and the dtype that it is added up in.
DTYPES: dict[str, tuple[list[torch.dtype], torch.dtype]] = {
    "float64": ([F64], F64),
    "float32": ([F32], F32),
    "bfloat16": ([BF16], F32),
    "complex": ([C64], F32),
    "mixed": ([F32, BF16, torch.float16, C64, F32], F32),
    "mixed with float64": ([F32, F64, BF16, torch.complex128], F64),
}
# Which modules every rank holds whole: none, one that has padding when sharded, and all.
IGNORED: dict[str, list[str]] = {"sharded": [], "b whole": ["b"], "all whole": ["a", "b", "c"]}
TOLERANCE = {F64: {"rtol": 1e-13, "atol": 0.0}, F32: {"rtol": 2e-6, "atol": 0.0}}

CASES = [(axes, dtypes) for axes in AXES for dtypes in DTYPES if axes == {"shard": 3} or dtypes.startswith("mixed")]

every_axes = pytest.mark.parametrize("axes", AXES, ids=str)
every_power = pytest.mark.parametrize("p", POWERS)


def values(dtypes: str = "float64", seed: int = 0) -> dict[str, Tensor]:
    generator, kinds = torch.Generator().manual_seed(seed), DTYPES[dtypes][0]
    draw = lambda i, shape: torch.randn(shape, generator=generator, dtype=torch.complex128).to(  # noqa: E731
        kinds[i % len(kinds)] if kinds[i % len(kinds)].is_complex else torch.complex128
    )
    drawn = {name: draw(i, shape) for i, (name, shape) in enumerate(SHAPES.items())}
    return {
        name: x if x.dtype in kinds else x.real.to(kinds[i % len(kinds)]) for i, (name, x) in enumerate(drawn.items())
    }


def sharded(mesh: fs.Mesh, dtypes: str = "float64", ignored: str = "sharded", **options: Any) -> fs.Sharded:
    """With integers as well, so that they can be seen to count nothing."""
    given = {**values(dtypes), **FROZEN}
    return fs.shard(given, fs.plan(given, mesh, ignored=IGNORED[ignored], **options))


def with_padding(tree: fs.Sharded, padding: float) -> fs.Sharded:
    """The same tree, its padding overwritten, on stacked or on real ranks."""
    mesh, shards = tree.layout.mesh, {}
    for key, buffer in tree.layout.buffers.items():
        sizes = buffer.split_sizes()
        number = torch.cat([torch.full((n,), float(i % 2)) for i, n in enumerate(sizes)])
        rows = number.view(buffer.num_shards, -1)
        axis = list(mesh.axes).index("shard") if buffer.num_shards > 1 else None
        if mesh.is_simulated:
            shape = [size if i == axis else 1 for i, size in enumerate(mesh.axes.values())]
            mask = rows.view(*shape, -1).expand_as(tree[key])
        else:
            mask = rows[int(fs.collectives.axis_index(mesh["shard"])) if axis is not None else 0]
        shards[key] = torch.where(mask.bool(), padding, tree[key]) if buffer.differentiable else tree[key]
    return fs.Sharded(shards, tree.layout)


def some_none(tree: fs.Sharded) -> fs.Sharded:
    """As gradients of frozen parameters are."""
    return fs.Sharded({key: None if key.startswith("c") else x for key, x in tree.items()}, tree.layout)


def wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.abs().to(dtype) if x.is_complex() else x.to(dtype)


def total(tensors: Mapping[str, Tensor], p: float, dtype: torch.dtype) -> Tensor:
    """By torch, on the whole tensors; of empty ones it refuses to take the largest magnitude."""
    return get_total_norm([wide(x, dtype) for x in tensors.values() if x.numel() or p != INF], p)


def first(x: Tensor, mesh: fs.Mesh) -> Tensor:
    """The value of all ranks, which have to have the same."""
    rows = x.flatten(0, len(mesh.axes) - 1)
    assert len(rows) == mesh.size
    assert all(torch.equal(row, rows[0]) or (row.isnan() and rows[0].isnan()) for row in rows)
    return rows[0]


# --- the norm


@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize(("axes", "dtypes"), CASES, ids=str)
@every_power
def test_the_norm_is_that_of_the_whole_tensors(axes: dict[str, int], p: float, dtypes: str, ignored: str) -> None:
    mesh, dtype = fs.simulated_mesh(axes), DTYPES[dtypes][1]
    tree, expected = sharded(mesh, dtypes, ignored), total(values(dtypes), p, dtype)
    inside = mesh.spmd(lambda tree: fs.global_norm(tree, p))(tree)
    assert_trees_close(first(inside, mesh), expected, **TOLERANCE[dtype])
    outside = fs.global_norm(tree, p)
    assert_trees_close(outside, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("p", [1, 2, 4.5, INF])
def test_what_is_whole_on_every_rank_counts_once_even_when_there_is_nothing_else(p: float) -> None:
    mesh = fs.simulated_mesh(3)
    given = {"w": torch.tensor([3.0, -4.0])}
    tree = fs.shard(given, fs.plan(given, mesh, ignored=["w"]))
    assert_trees_close(first(mesh.spmd(lambda tree: fs.global_norm(tree, p))(tree), mesh), total(given, p, F32))


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
@pytest.mark.parametrize("axes", AXES[1:4] + AXES[5:], ids=str)
def test_missing_gradients_and_integers_count_nothing(axes: dict[str, int], p: float) -> None:
    mesh = fs.simulated_mesh(axes)
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


def padded(mesh: fs.Mesh, ignored: str = "b whole") -> fs.Sharded:
    tree = sharded(mesh, "float32", ignored, align_bytes=64, units=10**9)
    assert sum(sum(buffer.split_sizes()[1::2]) for buffer in tree.layout.buffers.values()) > 8
    return tree


@every_power
@pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 3}, {"replicate": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("padding", [NAN, INF, 1e30])
def test_padding_never_reaches_the_norm(axes: dict[str, int], p: float, padding: float) -> None:
    mesh = fs.simulated_mesh(axes)
    tree = padded(mesh)
    dirty = with_padding(tree, padding)
    for run in (lambda fn: fn, mesh.spmd):
        norms = run(lambda tree: (fs.global_norm(tree, p), fs.debug.param_norms(tree, p)))
        assert_trees_close(norms(dirty), norms(tree), rtol=0, atol=0)
        clip = run(lambda tree: fs.clip_by_global_norm(tree, 0.5, p))
        (clipped, _), (expected, _) = clip(dirty), clip(tree)
        assert_trees_close(with_padding(clipped, 0.0), expected, rtol=0, atol=0)


@every_power
def test_padding_has_no_gradient_and_its_tangent_does_not_count(p: float) -> None:
    mesh = fs.simulated_mesh(3)
    tree, _ = fs.partition(with_padding(padded(mesh), NAN))
    clean = with_padding(tree, 0.0)
    gradient = mesh.spmd(grad(lambda tree: fs.global_norm(tree, p)))
    assert_trees_close(gradient(tree), gradient(clean), rtol=0, atol=0)
    assert_trees_close(with_padding(gradient(tree), 0.0), gradient(tree), rtol=0, atol=0)
    tangent = mesh.spmd(lambda tree, v: jvp(lambda tree: fs.global_norm(tree, p), (tree,), (v,))[1])
    assert_trees_close(tangent(clean, tree), tangent(clean, clean), rtol=0, atol=0)


# --- what is sent


@every_power
@pytest.mark.parametrize("ignored", IGNORED)
@every_axes
def test_one_number_is_sent_over_the_shard_axis_and_none_over_replicas(
    axes: dict[str, int], ignored: str, p: float
) -> None:
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


# --- clipping


def clipped_by_torch(tensors: Mapping[str, Tensor], max_norm: float, p: float) -> tuple[dict[str, Tensor], Tensor]:
    params = {name: nn.Parameter(torch.zeros_like(x)) for name, x in tensors.items() if x.numel() or p != INF}
    for name, param in params.items():
        param.grad = tensors[name].clone()
    norm = clip_grad_norm_(params.values(), max_norm, p)
    clipped = {name: params[name].grad if name in params else x for name, x in tensors.items()}
    return {name: x for name, x in clipped.items() if x is not None}, norm


@every_power
@pytest.mark.parametrize("dtypes", ["float64", "float32", "complex"])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("axes", [{"shard": 3}, {"replicate": 2, "shard": 2}], ids=str)
def test_clipping_is_that_of_torch(axes: dict[str, int], max_norm: float, dtypes: str, p: float) -> None:
    mesh, dtype = fs.simulated_mesh(axes), DTYPES[dtypes][1]
    tree = sharded(mesh, dtypes, "b whole")
    expected, norm = clipped_by_torch(values(dtypes), max_norm, p)
    before = copied(tree)
    for run in (lambda fn: fn, mesh.spmd):
        clipped, actual = run(lambda tree: fs.clip_by_global_norm(tree, max_norm, p))(tree)
        assert_trees_close(actual if actual.ndim == 0 else first(actual, mesh), norm, **TOLERANCE[dtype])
        assert_trees_close(dict(fs.gather(clipped)), {**expected, **FROZEN}, **{**TOLERANCE[dtype], "atol": 1e-30})
        assert_trees_close(tree, before, rtol=0, atol=0)


def test_clipping_keeps_every_dtype() -> None:
    mesh = fs.simulated_mesh(3)
    tree = sharded(mesh, "mixed with float64", "b whole")
    for run in (lambda fn: fn, mesh.spmd):
        clipped, norm = run(lambda tree: fs.clip_by_global_norm(tree, 1.0))(tree)
        assert {key: x.dtype for key, x in clipped.items()} == {key: x.dtype for key, x in tree.items()}
        assert norm.dtype == F64
        assert fs.global_norm(clipped) == pytest.approx(1.0, rel=1e-3)  # some are bfloat16


@every_power
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_norm_that_is_not_finite_does_what_it_does_in_torch(bad: float, p: float) -> None:
    mesh = fs.simulated_mesh(3)
    given = values() | {"b.w": torch.tensor([1.0, bad, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=F64)}
    tree = fs.shard(given, fs.plan(given, mesh))
    expected, norm = clipped_by_torch(given, 1.0, p)
    for run in (lambda fn: fn, mesh.spmd):
        clipped, actual = run(lambda tree: fs.clip_by_global_norm(tree, 1.0, p))(tree)
        assert_trees_close(actual if actual.ndim == 0 else first(actual, mesh), norm)
        assert_trees_close(dict(fs.gather(clipped)), expected)


# --- norms by name


@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize(("axes", "dtypes"), CASES, ids=str)
@every_power
def test_norms_by_name_are_those_of_each_tensor(axes: dict[str, int], p: float, dtypes: str, ignored: str) -> None:
    mesh = fs.simulated_mesh(axes)
    tree = sharded(mesh, dtypes, ignored)
    expected = {}
    for name, x in values(dtypes).items():
        dtype = F64 if x.dtype in (F64, torch.complex128) else F32
        expected[name] = total({name: x}, p, dtype) if x.numel() else torch.zeros((), dtype=dtype)
    tolerance = {"rtol": 2e-6, "atol": 0.0}
    outside = fs.debug.param_norms(tree, p)
    assert list(outside) == list(expected)
    assert_trees_close(outside, expected, **tolerance)
    inside = mesh.spmd(lambda tree: fs.debug.param_norms(tree, p))(tree)
    assert list(inside) == list(expected)
    assert_trees_close({name: first(x, mesh) for name, x in inside.items()}, expected, **tolerance)


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


def test_the_precision_to_compute_in_is_not_that_of_norms() -> None:
    mesh = fs.simulated_mesh(3)
    exact = sharded(mesh, "float32")
    half = sharded(mesh, "float32", precision=fs.MixedPrecision(BF16, BF16))
    for verb in (fs.global_norm, fs.debug.param_norms, fs.clip_by_global_norm):
        options = {"max_norm": 1.0} if verb is fs.clip_by_global_norm else {}
        for run in (lambda fn: fn, mesh.spmd):
            norms = [
                run(lambda tree, verb=verb, options=options: verb(tree, **options))(tree) for tree in (half, exact)
            ]
            norms = [(dict(x[0]), x[1]) if isinstance(x, tuple) else x for x in norms]
            assert_trees_close(norms[0], norms[1], rtol=0, atol=0)


# --- derivatives


def num_returned(tree: fs.Sharded, name: str) -> int:
    """How many ranks' results depend on one rank's part: those of all shards, or of a whole buffer only its own."""
    return tree.layout.buffers[tree.layout.key_of[name]].num_shards


@every_power
@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 2}, {"shard": 5}, {"replicate": 2, "shard": 2}], ids=str)
def test_derivatives_are_those_of_the_norm_of_whole_tensors(axes: dict[str, int], ignored: str, p: float) -> None:
    mesh = fs.simulated_mesh(axes)
    given, v = values(), values(seed=1)
    layout = fs.plan(given, mesh, ignored=IGNORED[ignored])
    tree, direction = fs.shard(given, layout), fs.shard(v, layout)
    norm = lambda tree: fs.global_norm(tree, p)  # noqa: E731
    plain = lambda tensors: vector_norm(tensors, p)  # noqa: E731

    gradient = whole(mesh.spmd(grad(norm))(tree), axes.get("replicate", 1))
    once = {name: gradient[name] / num_returned(tree, name) for name in given}
    assert_trees_close(once, grad(plain)(given), rtol=1e-11, atol=1e-13)

    tangent = mesh.spmd(lambda tree, v: jvp(norm, (tree,), (v,))[1])(tree, direction)
    assert_trees_close(first(tangent, mesh), jvp(plain, (given,), (v,))[1], rtol=1e-11, atol=1e-13)

    second = mesh.spmd(lambda tree, v: jvp(grad(norm), (tree,), (v,))[1])(tree, direction)
    once = {name: x / num_returned(tree, name) for name, x in whole(second, axes.get("replicate", 1)).items()}
    assert_trees_close(once, jvp(grad(plain), (given,), (v,))[1], rtol=1e-10, atol=1e-12)


def vector_norm(tensors: Mapping[str, Tensor], p: float) -> Tensor:
    return torch.linalg.vector_norm(torch.cat([x.flatten() for x in tensors.values()]), p)


@every_power
def test_outside_spmd_every_copy_has_the_gradient_of_the_one_norm(p: float) -> None:
    mesh = fs.simulated_mesh({"replicate": 2, "shard": 2})
    given = values()
    tree = fs.shard(given, fs.plan(given, mesh, ignored=["b"]))
    gradient = grad(lambda tree: fs.global_norm(tree, p))(tree)
    expected = fs.shard(grad(lambda tensors: vector_norm(tensors, p))(given), tree.layout)
    assert_trees_close(gradient, expected, rtol=1e-12, atol=1e-14)


@every_power
@pytest.mark.parametrize("dtypes", ["float64", "complex"])
def test_at_zero_every_derivative_is_zero_and_not_nan(dtypes: str, p: float) -> None:
    mesh = fs.simulated_mesh(3)
    given = {name: torch.zeros_like(x) for name, x in values(dtypes).items()}
    tree = fs.shard(given, fs.plan(given, mesh, ignored=["b"]))
    for run in (lambda fn: fn, mesh.spmd):
        gradient = run(grad(lambda tree: fs.global_norm(tree, p)))(tree)
        assert_trees_close(gradient, tree, rtol=0, atol=0)
        clipped = run(lambda tree: fs.clip_by_global_norm(tree, 1.0, p)[0])(tree)
        assert_trees_close(clipped, tree, rtol=0, atol=0)
    partly = {**given, "a.w": values(dtypes)["a.w"]}
    tree = fs.shard(partly, tree.layout)
    gradient = mesh.spmd(grad(lambda tree: fs.global_norm(tree, p)))(tree)
    alone = total({"a.w": partly["a.w"]}, p, DTYPES[dtypes][1])
    for name, x in fs.gather(gradient).items():
        assert x.isfinite().all()
        assert (name == "a.w") == bool(x.any())
        if p == 2 and name == "a.w":
            assert_trees_close(x, 3 * partly[name] / alone)


def test_curvature_counts_parameters_that_are_zero_too() -> None:
    mesh = fs.simulated_mesh(2)
    given = {"a.w": torch.tensor([3.0, 4.0]), "b.w": torch.zeros(3)}  # torch's own norm of norms sees none in b
    layout = fs.plan(given, mesh)
    tree, v = fs.shard(given, layout), fs.shard({"a.w": torch.zeros(2), "b.w": torch.ones(3)}, layout)
    second = mesh.spmd(lambda tree, v: jvp(grad(fs.global_norm), (tree,), (v,))[1])(tree, v)
    assert_trees_close(dict(fs.gather(second)), {"a.w": torch.zeros(2), "b.w": 2 * torch.full((3,), 1 / 5)})


@pytest.mark.parametrize("p", [2.0, 3.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("axes", "ignored"),
    [({"shard": 3}, None), ({"shard": 3}, ["out", "scale"]), ({"replicate": 2, "shard": 2}, None)],
    ids=str,
)
def test_a_penalty_on_the_norm_of_the_gradient_trains_as_unsharded(
    axes: dict[str, int], ignored: Any, reduction: Any, p: float
) -> None:
    mesh = fs.simulated_mesh(axes)
    data = Data(mesh.size)
    (given, frozen), (xs, ys), model = data.parameters(), data.samples(), awkward(data.seed)
    layout = fs.plan(model, mesh, reduction=reduction, ignored=ignored or ())
    params, rest = fs.partition(fs.shard(model, layout))
    loss = lambda p, rest, x, y: loss_of(model, fs.gather(p, rest), x, y)  # noqa: E731
    penalty = lambda q, rest, x, y: fs.global_norm(grad(loss)(q, rest, x, y), p)  # noqa: E731
    batch = mesh.split((xs.flatten(0, 1), ys.flatten(0, 1)))
    actual = whole(mesh.spmd(grad(penalty))(params, rest, *batch), axes.get("replicate", 1))

    plain = lambda q, x, y: loss_of(model, {**q, **frozen}, x, y)  # noqa: E731
    inner: Callable[..., Any] = grad(lambda q: data_parallel_loss(plain, reduction, q, xs, ys))
    times = 1 if reduction == "mean" else mesh.size  # every rank returns the one norm
    expected = grad(lambda q: times * vector_norm(inner(q), p))(given)
    assert_trees_close(actual, expected, rtol=1e-10, atol=1e-12)


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


@pytest.mark.parametrize("max_norm", [-1.0, NAN])
def test_a_negative_norm_to_clip_to_is_refused(max_norm: float) -> None:
    text = refused(fs.clip_by_global_norm, sharded(fs.simulated_mesh(2)), max_norm)
    assert text == f"ValueError: clip_by_global_norm: max_norm: got {max_norm}, expected 0 or more"
