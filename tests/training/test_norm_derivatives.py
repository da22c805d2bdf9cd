"""Derivatives of the norm on simulated ranks: those of the norm of whole tensors, and none at zero or of padding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.laws.tasks import whole
from tests.support.norms import DTYPES, IGNORED, NAN, POWERS, first, padded, total, values, with_padding

every_power = pytest.mark.parametrize("p", POWERS)


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


def num_returned(tree: fs.Sharded, name: str) -> int:
    """How many ranks' results depend on one rank's part: those of all shards, or of a whole buffer only its own."""
    return tree.layout.buffers[tree.layout.key_of[name]].num_shards


@pytest.mark.parametrize(
    ("axes", "ignored"), [({"shard": 5}, "b whole"), ({"replicate": 2, "shard": 2}, "sharded")], ids=str
)
@every_power
def test_derivatives_are_those_of_the_norm_of_whole_tensors(axes: dict[str, int], ignored: str, p: float) -> None:
    mesh = fs.simulated_mesh(axes)
    given, v = values(), values(seed=1)
    layout = fs.plan(given, mesh, ignored=IGNORED[ignored])
    tree, direction = fs.shard(given, layout), fs.shard(v, layout)
    norm, plain = partial(fs.global_norm, p=p), partial(vector_norm, p=p)

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
def test_at_zero_every_derivative_is_zero_and_not_nan(p: float) -> None:
    dtypes = "complex"
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
