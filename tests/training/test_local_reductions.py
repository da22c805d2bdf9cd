"""What is computed from several elements of a rank's shards alone, as other libraries do it, and what replaces it."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.curvature import gauss_newton
from tests.laws import convention
from tests.support.ranks import HYBRID, Ranks, gloo, simulated, slow


def gradient(mesh: fs.Mesh) -> tuple[fs.Sharded, Any]:
    params = fs.shard(convention.whole_parameters(), fs.plan(convention.whole_parameters(), mesh))
    rows = mesh.split(tuple(x.flatten(0, 1) for x in convention.Samples.of(mesh.size).tensors()[:2]))
    return mesh.spmd(fs.grad(lambda p, x, y: convention.plain_loss(fs.gather(p), x, y)))(params, *rows), (params, rows)


def of_leaves(a: Any, b: Any) -> Tensor:
    return torch.stack([(a[key] * b[key]).sum() for key in a]).sum()


def conjugate_gradients(matvec: Any, b: Any, dot: Any, steps: int = 60) -> Any:
    tree_map: Any = optree.tree_map
    x, r, p = tree_map(torch.zeros_like, b), b, b
    for _ in range(steps):
        q = matvec(p)
        alpha = dot(r, r) / (dot(p, q) + 1e-300)
        x = tree_map(lambda x, p: x + alpha * p, x, p)  # noqa: B023  (called at once)
        old, r = r, tree_map(lambda r, q: r - alpha * q, r, q)  # noqa: B023
        beta = dot(r, r) / (dot(old, old) + 1e-300)
        p = tree_map(lambda r, p: r + beta * p, r, p)  # noqa: B023
    return x


def solutions(mesh: fs.Mesh) -> Any:
    """How far the solution is off: with an inner product over all ranks, and with that of leaves."""
    grads, (params, rows) = gradient(mesh)

    def predict(p: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(convention.model(), fs.gather(p), (x,))

    def residual(dot: Any) -> Any:
        def run(params: Any, grads: Any, x: Tensor, y: Tensor) -> Any:
            made = gauss_newton(predict, lambda out, y: (out - y).square().mean())(params, x, y)

            def damped(v: Any) -> Any:
                return optree.tree_map(lambda a, b: a + 0.1 * b, made @ v, v)

            off: Any = optree.tree_map(torch.sub, damped(conjugate_gradients(damped, grads, dot)), grads)
            return (fs.curvature.vdot(off, off) / fs.curvature.vdot(grads, grads)).sqrt()

        return mesh.spmd(run)(params, grads, *rows)

    return residual(fs.curvature.vdot), residual(of_leaves)


@pytest.mark.parametrize("ranks", [*simulated(3), *slow(gloo(HYBRID))], ids=str)
def test_conjugate_gradients_with_an_inner_product_of_leaves_solve_nothing(ranks: Ranks) -> None:
    for right, wrong in ranks.run(solutions):
        assert right < 1e-9
        assert not wrong < 5e-2
