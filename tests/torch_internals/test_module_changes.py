"""Ranks that take turns share a module: each has its own mode of training and hooks, as processes do."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import functorch_shard as fs
from functorch_shard.collectives import psum
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import gloo, sequential


def dropping() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)).to(torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel(), dtype=p.dtype).sin().view(p.shape))
    return model


def keeping(seen: list[Tensor]) -> Any:
    """A hook."""
    return lambda module, args, output: seen.append(output)


def distilled(mesh: fs.Mesh) -> Any:
    """Gradients of a loss with a teacher in evaluation mode, and the activations that a hook has seen."""
    model = dropping()
    params = fs.shard(model, fs.plan(model, mesh))

    def step(params: fs.Sharded, x: Tensor) -> Any:
        seen: list[Tensor] = []
        handle = model[0].register_forward_hook(keeping(seen))
        model.eval()
        teacher = functional_call(model, fs.gather(params), (x,))
        model.train()
        handle.remove()
        model[1].eval()
        loss = lambda params: (functional_call(model, fs.gather(params), (2 * x,)) - teacher).square().mean()  # noqa: E731
        return teacher, torch.stack(seen), fs.grad(loss)(params)

    x = torch.arange(12.0 * mesh.size, dtype=torch.float64).cos()
    return mesh.spmd(step)(params, mesh.split(x.view(3 * mesh.size, 4)))


def test_a_teacher_in_evaluation_mode_and_hooks_are_those_of_real_ranks() -> None:
    for one, other in zip(sequential(2)[0].run(distilled), gloo(2)[0].run(distilled), strict=True):
        assert_trees_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("of_all", [False, True], ids=["of one module", "of all modules"])
def test_a_hook_is_not_called_for_other_ranks(of_all: bool) -> None:
    mesh, model = fs.simulated_mesh(3, kind="sequential"), dropping()

    def calls(x: Tensor) -> list[int]:
        seen: list[int] = []
        hook = lambda module, args, output: seen.append(mesh.rank)  # noqa: E731
        handle = register_module_forward_hook(hook) if of_all else model[0].register_forward_hook(hook)
        psum(x, mesh)
        model[0](x)
        psum(x, mesh)
        handle.remove()
        model[0](x)
        return seen

    assert mesh.spmd(calls, out_dims="list")(torch.ones(3, 4, dtype=torch.float64)) == [[0], [1], [2]]
    assert not model[0]._forward_hooks


def test_operations_are_counted_by_the_modules_of_one_rank() -> None:
    mesh = fs.simulated_mesh(2, kind="sequential")
    model = nn.Sequential(nn.Linear(4, 4), Summed(mesh), nn.Linear(4, 4))

    def counts(x: Tensor) -> Any:
        with FlopCounterMode(display=False) as flops:
            model(x)
        return {name: sum(each.values()) for name, each in flops.get_flop_counts().items()}

    first, second = mesh.spmd(counts, out_dims="list")(torch.ones(2, 3, 4))
    assert first == second
    assert first["Sequential"] == 2 * 3 * 4 * 4 * 2


class Summed(nn.Module):
    def __init__(self, mesh: fs.Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        return psum(x, self.mesh)


def test_a_mode_that_all_ranks_leave_and_a_hook_that_is_not_removed_stay() -> None:
    mesh, model = fs.simulated_mesh(2, kind="sequential"), dropping()

    def leave(x: Tensor) -> bool:
        model[1].eval()
        if mesh.rank == 1:
            model[2].eval()
            model[0].register_forward_hook(keeping([]))
        psum(x, mesh)
        return model[2].training

    assert mesh.spmd(leave, out_dims="list")(torch.ones(2)) == [True, False]
    assert [part.training for part in model] == [True, False, True]
    assert len(model[0]._forward_hooks) == 1


def test_modules_that_a_rank_makes_and_lets_go_are_freed() -> None:
    mesh = fs.simulated_mesh(2, kind="sequential")

    def made(x: Tensor) -> bool:
        model = dropping().eval()
        model.register_forward_hook(lambda module, args, output: None)
        there = ref(model)
        psum(x, mesh)
        del model
        gc.collect()
        psum(x, mesh)
        return there() is None

    assert mesh.spmd(made, out_dims="list")(torch.ones(2)) == [True, True]
