"""torchopt on shards of gloo ranks: what is right, what is of one rank alone, and what replaces it."""

from __future__ import annotations

import re
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import optree
import pytest

import functorch_shard as fs
from functorch_shard.curvature import to_vector
from tests.curvature.tasks import operator
from tests.laws import convention
from tests.support.pages import run
from tests.support.ranks import HYBRID, Ranks, gloo

needs_torchopt = pytest.mark.skipif(find_spec("torchopt") is None, reason="torchopt is not installed")
every_kind = pytest.mark.parametrize("ranks", gloo(2, HYBRID), ids=str)


@pytest.mark.parametrize("library", ["torchopt", "tensordict"])
def test_the_python_of_the_page_runs_with_their_programs(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(library)
    others = re.compile(r"^(?:import|from) (?!torch\b|optree|functorch_shard)(\w+)", re.MULTILINE)
    run("docs/pytree_libraries.md", capsys, lambda block: {*others.findall(block)} <= {library})


def clipped(mesh: fs.Mesh) -> list[float]:
    """Norms after clipping to 0.01: by the library, and by this one."""
    torchopt, (params, _, samples) = import_module("torchopt"), convention.on(mesh)
    grads = mesh.spmd(fs.grad(partial(convention.sharded_loss, lazy=None)))(params, samples.x, samples.y)
    clip = torchopt.clip.clip_grad_norm(0.01)
    by_torchopt, _ = clip.update(grads, clip.init(grads), inplace=False)
    return [fs.global_norm(by_torchopt).item(), fs.global_norm(fs.clip_by_global_norm(grads, 0.01)[0]).item()]


@needs_torchopt
@every_kind
def test_clipping_of_torchopt_clips_by_the_norm_of_each_rank(ranks: Ranks) -> None:
    for by_torchopt, by_this in ranks.run(clipped):
        assert by_torchopt > 1.1 * by_this
        assert by_this == pytest.approx(0.01, rel=1e-4)


def solved(mesh: fs.Mesh) -> list[Any]:
    """By torchopt's cg, on trees of shards and on flat vectors: how far each is off, relatively."""
    cg, made = import_module("torchopt").linalg.cg, operator(mesh, "gauss_newton")
    b = fs.partition(made.params)[0]
    vector = to_vector(b)
    by_tree = cg(lambda v: optree.tree_map(lambda a, b: a + 0.1 * b, made @ v, v), b, rtol=1e-10, maxiter=50)
    by_vector = cg(lambda v: made @ v + 0.1 * v, vector, rtol=1e-10)
    solutions = [to_vector(by_tree), by_vector]
    return [((made @ x + 0.1 * x - vector).norm() / vector.norm()).item() for x in solutions]


@needs_torchopt
@every_kind
def test_cg_of_torchopt_solves_on_flat_vectors_and_not_on_shards(ranks: Ranks) -> None:
    for by_tree, by_vector in ranks.run(solved):
        assert by_vector < 1e-8
        assert not by_tree < 1e-2
