"""Eigenvalues by hessian-eigenthings: of its exact operator for a plain model, and of ours, on vectors of shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import functorch_shard as fs
from functorch_shard.curvature import from_vector
from tests.referees.programs.curvature import data, direction, made, operator
from tests.referees.referee import Referee, Where, of_all
from tests.referees.training import fully_sharded

STEPS = 39  # one for each parameter but a few: the ends of the spectrum have converged


@dataclass(frozen=True)
class Trees:
    """What their Lanczos needs to know of vectors, which are ``Sharded`` here."""

    def dot(self, a: fs.Sharded, b: fs.Sharded) -> Tensor:
        return fs.curvature.vdot(a, b)

    def norm(self, a: fs.Sharded) -> Tensor:
        return fs.curvature.vdot(a, a).sqrt()

    def axpy(self, alpha: Any, a: Any, b: Any) -> Any:
        return optree.tree_map(lambda x, y: alpha * x + y, a, b)

    def scale(self, alpha: Any, a: Any) -> Any:
        return optree.tree_map(lambda x: alpha * x, a)

    def zeros_like(self, a: Any) -> Any:
        return optree.tree_map(torch.zeros_like, a)


def theirs(model: Any, method: str = "autograd", dtype: torch.dtype = torch.float64) -> Any:
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return import_module("hessian_eigenthings").HessianOperator(model, [data(dtype)], loss, method=method)


def ends(result: Any) -> Tensor:
    """The largest and smallest eigenvalues of a tridiagonal matrix."""
    alphas, betas = result.alphas.double(), result.betas.double()
    values = torch.linalg.eigvalsh(torch.diag(alphas) + torch.diag(betas, 1) + torch.diag(betas, -1))
    return values[[0, 1, -2, -1]]


def lanczos(matrix: Any, start: Any, **options: Any) -> Tensor:
    steps = import_module("hessian_eigenthings.algorithms.lanczos").lanczos_tridiagonal
    return ends(steps(matrix, start, STEPS, **options))


def exact() -> Tensor:
    matrix = theirs(made())
    return lanczos(matrix, direction(matrix.size))


def on_trees(where: Where, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """By their Lanczos; unsharded in float64."""
    if isinstance(where, int):
        return of_all({"eigenvalues": exact()})
    ours = operator("hessian", where, dtype)
    start = from_vector(direction(ours.shape[0]), ours.params.layout)
    matrix = import_module("hessian_eigenthings").LambdaOperator(ours.matvec, ours.shape[0], dtype=dtype)
    return of_all({"eigenvalues": lanczos(matrix, start, backend=Trees())})


def by_differences(where: Where, dtype: torch.dtype) -> dict[str, Any]:
    """Of the plain model, by finite differences, which take the place of exact products under FSDP."""
    if isinstance(where, int):
        return on_trees(where)
    matrix = theirs(made(dtype), "finite_difference", dtype)
    return of_all({"eigenvalues": lanczos(matrix, direction(matrix.size).to(dtype))})


def on_vectors(where: Where) -> dict[str, Any]:
    """By their Lanczos and their estimator of the trace, from our operator for flat vectors."""
    library = import_module("hessian_eigenthings")
    if isinstance(where, int):
        matrix: Any = theirs(made())
    else:
        made_by_ranks = operator("hessian", where)
        matrix = library.LambdaOperator(made_by_ranks.matvec, made_by_ranks.shape[0], dtype=torch.float64)
    values = library.lanczos(matrix, k=2, max_iter=STEPS, which="LA", seed=0).eigenvalues
    trace = torch.tensor(library.hutchinson(matrix, num_samples=10, seed=0).estimate)
    return of_all({"eigenvalues": values, "trace": trace})


def by_fsdp2(mesh: fs.Mesh, method: str) -> dict[str, Any]:
    """Their operator on a model of FSDP2."""
    matrix = theirs(fully_sharded(made()), method)
    return of_all({"eigenvalues": lanczos(matrix, direction(matrix.size))})


def referee(name: str, program: Any, tolerance: float = 1e-10, **options: Any) -> Referee:
    return Referee("hessian_eigenthings", name, program, tolerance=tolerance, **options)


SINGLE = {"dtype": torch.float32}
DOUBLE = {"dtype": torch.float64}
REFEREES = [
    referee("Lanczos on trees of shards", on_trees, fsdp2=partial(by_fsdp2, method="autograd")),
    referee(
        "their finite differences, without shards",
        partial(by_differences, **DOUBLE),
        1e-6,
        fsdp2=partial(by_fsdp2, method="finite_difference"),
    ),
    referee("float32: Lanczos on trees of shards", partial(on_trees, **SINGLE), 1e-5),
    referee("float32: their finite differences, without shards", partial(by_differences, **SINGLE), 1e-1),
    referee("Lanczos and trace on flat vectors", on_vectors),
]
