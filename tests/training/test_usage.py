"""A loss that does not depend on its parameters is refused; one that leaves some of them out is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

import functorch_shard as fs
from tests.support.models import draws, two_layers
from tests.support.ranks import Ranks, gloo
from tests.support.refusals import refused

MESHES = [fs.init_mesh(), fs.simulated_mesh({"replicate": 2, "shard": 2})]
KINDS = [fs.simulated_mesh(2), fs.simulated_mesh(2, kind="sequential"), fs.init_mesh()]
on_meshes, on_each_kind = (pytest.mark.parametrize("mesh", meshes, ids=str) for meshes in (MESHES, KINDS))
WHERE: dict[str, Callable[[Any], Any]] = {
    "plain": lambda fn: fn,
    "vmap": lambda fn: lambda p, x: vmap(fn, in_dims=(None, 0))(p, x[None]),
    "jvp": lambda fn: lambda p, x: jvp(lambda x: fn(p, x)[0], (x,), (x,)),
    "grad": lambda fn: lambda p, x: torch.func.grad(lambda x: sum(g.sum() for g in fn(p, x)[0].values()))(x),
}


def problem(mesh: fs.Mesh, trainable: bool = True) -> tuple[nn.Sequential, fs.Sharded, Tensor]:
    model = two_layers().requires_grad_(trainable)
    return model, fs.shard(model, fs.plan(model, mesh)), mesh.split(draws(1, torch.float32)(12, 5))


@on_meshes
def test_a_forgotten_functional_call_is_refused(mesh: fs.Mesh) -> None:
    model, params, rows = problem(mesh)

    def forgetful(params: fs.Sharded, x: Tensor) -> Tensor:
        fs.gather(params)
        return model(x).square().mean()

    by_full = mesh.spmd(lambda p, x: fs.grad(lambda full: model(x).mean())(fs.gather(p)))
    hooked = lambda x: x.register_hook(lambda grad: grad) and x  # noqa: E731
    of_x = mesh.spmd(fs.grad(lambda params, x: hooked(x).square().mean(), argnums=(0, 1)))
    constant = mesh.spmd(fs.grad(lambda params, x: torch.tensor(1.0)))
    text = refused(mesh.spmd(fs.grad_and_value(forgetful)), params, rows)
    assert text.startswith(
        "ValueError: grad: 1 problem\n  args[0]: the result of forgetful does not depend on this Sharded\n"
    )
    assert "functional_call(model, fs.gather(params), (x,)), or fs.apply" in text
    assert "does not depend on this Full" in refused(by_full, params, rows)
    for call in (of_x, constant):
        assert "args[0]: the result of <lambda> does not depend on" in refused(call, params, rows)


@pytest.mark.parametrize("where", WHERE)
@on_meshes
def test_it_is_refused_inside_of_other_transforms(mesh: fs.Mesh, where: str) -> None:
    model, params, rows = problem(mesh)
    wrong = WHERE[where](fs.grad_and_value(lambda p, x: (model(x) * len(fs.gather(p))).mean()))
    assert "does not depend on this Sharded" in refused(mesh.spmd(wrong), params, rows)
    right = WHERE[where](fs.grad_and_value(lambda p, x: functional_call(model, fs.gather(p), (x,)).square().mean()))
    mesh.spmd(right)(params, rows)


@on_meshes
def test_parameters_that_are_used_in_part_are_not_refused(mesh: fs.Mesh) -> None:
    _, params, rows = problem(mesh)
    one = mesh.spmd(fs.grad(lambda p, x: (x @ fs.gather(p)["0.weight"].T).mean()))(params, rows)
    assert one["0"].abs().sum() > 0
    assert one["2"].abs().sum() == 0
    both = mesh.spmd(fs.grad(lambda trees, x: fs.gather(trees[1])["2.bias"].sum()))((params, params), rows)
    assert [tree["2"].abs().sum().item() > 0 for tree in both] == [False, True]
    penalty = mesh.spmd(fs.grad(lambda p, x: sum(shard.square().sum() for shard in p.values())))(params, rows)
    # each rank returns its own part: their mean has the gradient of a shard's part of the sum
    assert all(torch.equal(penalty[key], 2 * params[key] / mesh.axes["shard"]) for key in params)


@on_meshes
def test_arguments_without_trainable_leaves_may_be_unused(mesh: fs.Mesh) -> None:
    _, params, rows = problem(mesh, trainable=False)
    for part in fs.partition(params):
        grads = mesh.spmd(fs.grad(lambda p, x: x.mean()))(part, rows)
        assert list(grads.values()) == [None] * len(part)
    assert torch.equal(fs.grad(lambda tree: torch.tensor(1.0))({"w": torch.ones(2)})["w"], torch.zeros(2))


@pytest.mark.parametrize("ranks", [Ranks({"shard": 2}, "sequential"), *gloo(2)], ids=str)
@pytest.mark.parametrize("size", [1, 3, 4])  # rank 1 has padding; an element that no rank uses, and padding; two
def test_a_rank_may_leave_the_parameters_unused_unless_all_ranks_do(ranks: Ranks, size: int) -> None:
    first, second = ranks.run(gradient_of_the_first_element, size, 3.0)
    assert (first.tolist(), second.tolist()) == (([1.5, 0.0], [0.0, 0.0]) if size > 1 else ([1.5], [0.0]))
    texts = ranks.run(refused_gradient, size)
    assert len({*texts}) == 1
    assert "does not depend on this Sharded" in texts[0]


def gradient_of_the_first_element(mesh: fs.Mesh, size: int, sample: float) -> torch.Tensor:
    """Of a loss that ranks without a sample compute without the parameters."""
    values = {"w": torch.ones(size)}
    params = fs.shard(values, fs.plan(values, mesh, align_bytes=0))

    def loss(params: fs.Sharded, samples: torch.Tensor) -> torch.Tensor:
        full = fs.gather(params, lazy=False)
        return full["w"][0] * samples.sum() if samples.any() else torch.zeros(())

    return mesh.spmd(lambda p, x: fs.grad(loss)(p, x)["(root)"])(params, mesh.split(torch.tensor([sample, 0.0])))


def refused_gradient(mesh: fs.Mesh, size: int) -> str:
    return refused(gradient_of_the_first_element, mesh, size, 0.0)


@pytest.mark.parametrize("lazy", [None, False])
@on_each_kind
def test_as_strided_from_an_offset_reads_its_own_parameter(mesh: fs.Mesh, lazy: bool | None) -> None:
    values = {"a": torch.arange(4.0), "b": 10 + torch.arange(4.0)}
    params = fs.shard(values, fs.plan(values, mesh, units=[["a", "b"]]))
    read = lambda p: fs.gather(p, lazy=lazy)["b"].as_strided((3,), (1,), 1).sum()  # noqa: E731
    assert {*mesh.spmd(read)(params).flatten().tolist()} == {36.0}
    grads = mesh.spmd(fs.grad(read))(params)
    assert fs.gather(grads)["b"].tolist() == [0.0, 1.0, 1.0, 1.0]


@on_each_kind
def test_a_tied_parameter_that_to_meta_untied_is_refused_under_functional_call(mesh: fs.Mesh) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    params = fs.shard(model, fs.plan(model, mesh))
    model.to("meta")
    x = mesh.split(torch.ones(mesh.size, 3))
    loss = lambda p, x: functional_call(model, fs.gather(p), (x,)).sum()  # noqa: E731
    text = refused(mesh.spmd(fs.grad(loss)), params, x)
    assert "a parameter of shape (3, 3) on the meta device is used" in text
    assert torch.isfinite(mesh.spmd(fs.grad(lambda p, x: fs.bind(model, p)(x).sum()))(params, x)["0"]).all()
