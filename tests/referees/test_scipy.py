"""scipy's solvers take the flat operators of a sharded loss, on simulated and on gloo ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

import functorch_shard as fs
from functorch_shard.curvature import to_vector
from tests.curvature.tasks import matrix, matrix_of_small, operator, small, vector
from tests.support.ranks import HYBRID, Ranks, gloo, simulated
from tests.support.scripts import example

pytest.importorskip("scipy")
every_kind = pytest.mark.parametrize("ranks", [*simulated(1, 3, HYBRID), *gloo(2, 3)], ids=str)


def start(n: int) -> Any:
    return np.random.default_rng(0).standard_normal(n)


def spectra(mesh: fs.Mesh) -> list[Any]:
    """Of the operator: by Lanczos on shards, and by eigsh outside of the ranks."""
    made, linalg = small(mesh), import_module("scipy.sparse.linalg")
    lanczos, begin = example("lanczos").lanczos, fs.curvature.randn_like(made.params, 0)
    by_trees = lanczos(made.matvec, begin, fs.curvature.vdot, made.shape[0])[0].numpy()
    by_scipy = [
        linalg.eigsh(made, k=1, which=end, v0=start(made.shape[0]), return_eigenvectors=False) for end in ("SA", "LA")
    ]
    return [by_trees[[0, -1]], np.concatenate(by_scipy)]


@every_kind
def test_lanczos_on_shards_is_eigsh_on_the_whole(ranks: Ranks) -> None:
    linalg, whole = import_module("scipy.sparse.linalg"), matrix_of_small(ranks.size).numpy()
    options = {"k": 1, "v0": start(len(whole)), "return_eigenvectors": False}
    ends = [linalg.eigsh(whole, which=end, **options) for end in ("SA", "LA")]
    for by_trees, by_scipy in ranks.run(spectra):
        np.testing.assert_allclose(by_trees, np.concatenate(ends), rtol=0, atol=1e-8)
        np.testing.assert_allclose(by_scipy, np.concatenate(ends), rtol=0, atol=1e-8)


def solved(mesh: fs.Mesh) -> list[Any]:
    """A damped natural gradient by cg, and a least squares solution by lsqr."""
    linalg, made = import_module("scipy.sparse.linalg"), operator(mesh, "gauss_newton")
    flat, b = linalg.aslinearoperator(made), to_vector(made.params).numpy()
    damped = flat + linalg.aslinearoperator(0.1 * np.eye(len(b)))
    x, info = linalg.cg(damped, b, rtol=1e-12)
    return [info, x, linalg.lsqr(damped, b, atol=1e-13, btol=1e-13)[0]]


@every_kind
def test_cg_and_lsqr_solve_with_the_matrix_of_the_whole(ranks: Ranks) -> None:
    damped = matrix("gauss_newton", ranks.size) + 0.1 * torch.eye(len(vector()), dtype=torch.float64)
    expected = torch.linalg.solve(damped, vector()).numpy()
    for info, by_cg, by_lsqr in ranks.run(solved):
        assert info == 0
        np.testing.assert_allclose(by_cg, expected, rtol=0, atol=1e-8)
        np.testing.assert_allclose(by_lsqr, expected, rtol=0, atol=1e-8)
