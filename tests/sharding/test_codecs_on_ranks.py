"""Encoded gathers and reductions on gloo ranks: bitwise what simulated ranks compute, in the bytes of the codec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.sharding.test_codecs import CODECS, recovery, values
from tests.support.pool import run_ranks

AXES: list[dict[str, int]] = [{"shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 2}]
FLOATS = ("a.w", "b.w", "c.s")


def loss(params: fs.Sharded, frozen: fs.Sharded, x: Tensor, codec: Any, lazy: bool | None) -> Tensor:
    """Elementwise, so that one rank at a time computes the same bits as all of them side by side."""
    full = fs.gather(params, frozen, codec=codec, lazy=lazy)
    return torch.stack([(full[name].double() * x[0]).square().sum() for name in FLOATS]).sum()


def results(mesh: fs.Mesh, lazy: bool | None = None) -> dict[str, Any]:
    """For each codec: parameters, gradients, per-sample gradients, two encoded reductions with what is owed."""
    told: dict[str, Any] = {}
    params, frozen = fs.partition(fs.shard(values(), fs.plan(values(), mesh)))
    torch.manual_seed(1)
    x = mesh.split(torch.randn(mesh.size, 2).double())
    for name, codec in CODECS.items():
        of = lambda p, f, x, codec=codec: loss(p, f, x, codec, lazy)  # noqa: E731
        each = lambda p, f, x, of=of: vmap(grad(of), (None, None, 0))(p, f, x.flatten()[:, None])  # noqa: E731
        told[name] = {
            "values": dict(mesh.spmd(lambda p, f, c=codec: fs.materialize(fs.gather(p, f, codec=c)))(params, frozen)),
            "fs.grad": dict(mesh.spmd(fs.grad(of))(params, frozen, x.flatten(-2) if mesh.is_simulated else x[0])),
            "vmap": dict(mesh.spmd(each)(params, frozen, x)),
            "reduced": reductions(mesh, codec),
        }
    return told


def reductions(mesh: fs.Mesh, codec: Any) -> Any:
    layout = fs.plan({name: x for name, x in values().items() if x.is_floating_point()}, mesh)
    error, told = None, []
    for step in range(2):
        torch.manual_seed(step)
        grads = {n: torch.randn(mesh.size, *s.shape, dtype=s.dtype) for n, s in layout.slots.items()}
        mine = {n: mesh.split(x) if mesh.is_simulated else mesh.split(x)[0] for n, x in grads.items()}
        mine = {n: x.squeeze(len(mesh.axes)) if mesh.is_simulated else x for n, x in mine.items()}
        reduce = lambda g, e: fs.codecs.scatter_encoded_grads(g, codec, e, layout)  # noqa: E731
        reduced, error = mesh.spmd(reduce)(mine, error)
        told.append(
            {**{f"{step} {key}": x for key, x in reduced.items()}, **{f"owed {k}": x for k, x in error.items()}}
        )
    return told


def results_on_this_rank(axes: dict[str, int]) -> list[Any]:
    mesh = fs.init_mesh(axes)
    return [results(mesh), results(mesh, lazy=False), counted(mesh), trained(mesh), trained(mesh, False)]


def counted(mesh: fs.Mesh) -> list[tuple[str, int]]:
    given = {"w": torch.randn(1000, 101)}
    params = fs.shard(given, fs.plan(given, mesh))
    with count_collectives() as seen:
        fs.grad(lambda p: (fs.gather(p, codec=CODECS["int8"])["w"] ** 2).sum())(params)
    return [(c.kind, c.nbytes) for c in seen.issued]


def trained(mesh: fs.Mesh, lazy: bool | None = None) -> list[Tensor]:
    """Losses of a deep model whose units are freed and gathered again, encoded, in backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(33, 33), torch.nn.Tanh()) for _ in range(5)])
    params = fs.shard(model, fs.plan(model, mesh))
    x = torch.randn(mesh.size, 4, 33)[mesh.rank]
    losses = []

    def of(p: fs.Sharded) -> Tensor:
        full = fs.gather(p, codec=CODECS["int8"], lazy=lazy)
        return torch.func.functional_call(model, full, (x,)).square().mean()

    for _ in range(4):
        grads, value = fs.grad_and_value(of)(params)
        params = fs.Sharded({k: v - 0.5 * grads[k] for k, v in params.items()}, params.layout)
        losses.append(value)
    return losses


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_gloo_ranks_lazily_or_at_once_compute_bitwise_what_simulated_ranks_do(axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh(axes)
    simulated = results(mesh)
    for rank, (lazily, at_once, issued, losses, plain) in enumerate(run_ranks(results_on_this_rank, mesh.size, axes)):
        expected = row(simulated, rank, len(axes))
        assert_trees_close(lazily, expected, rtol=0, atol=0)
        assert_trees_close(at_once, expected, rtol=0, atol=0)
        gathers = [nbytes for kind, nbytes in issued if kind == "all_gather"]
        assert len(gathers) in (1, 2)
        assert max(gathers) <= 0.26 * 4 * 101_000 / mesh.axes["shard"]
        assert_trees_close(losses, plain, rtol=0, atol=0)
        assert losses[-1] < losses[0]


def recovery_on_this_rank() -> list[tuple[list[bool], bool]]:
    return recovery(fs.init_mesh())


def test_error_feedback_recovers_on_gloo_ranks_as_on_simulated_ones() -> None:
    expected = recovery(fs.simulated_mesh(2))
    for told in run_ranks(recovery_on_this_rank, 2):
        assert told == [(finite[:1], owed) for finite, owed in expected]


def row(tree: Any, rank: int, num_axes: int) -> Any:
    if isinstance(tree, dict):
        return {key: row(x, rank, num_axes) for key, x in tree.items()}
    if isinstance(tree, list):
        return [row(x, rank, num_axes) for x in tree]
    return tree.flatten(0, num_axes - 1)[rank]
