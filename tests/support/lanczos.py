"""The Lanczos iteration in terms of trees: ``fs.curvature.vdot`` and ``tree_map`` alone."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

import functorch_shard as fs


def lanczos(matvec: Any, start: Any, steps: int) -> Tensor:
    """Eigenvalues of the tridiagonal matrix, with full reorthogonalization."""

    def axpy(a: Tensor, x: Any, y: Any) -> Any:
        return optree.tree_map(lambda x, y: a * x + y, x, y)

    basis: list[Any] = [optree.tree_map(lambda x: x / fs.curvature.vdot(start, start).sqrt(), start)]
    alphas, betas = [], []
    for _ in range(steps):
        w = matvec(basis[-1])
        alphas.append(fs.curvature.vdot(basis[-1], w))
        for _ in range(2):
            for q in basis:
                w = axpy(-fs.curvature.vdot(q, w), q, w)
        betas.append(fs.curvature.vdot(w, w).sqrt())
        if betas[-1] < 1e-10:
            break
        basis.append(optree.tree_map(lambda x, beta=betas[-1]: x / beta, w))
    off = torch.stack(betas[: len(alphas) - 1])
    return torch.linalg.eigvalsh(torch.diag(torch.stack(alphas)) + torch.diag(off, 1) + torch.diag(off, -1))
