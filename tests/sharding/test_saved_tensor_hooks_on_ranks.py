"""Saved-tensor hooks over lazy gathers: activations may be stored elsewhere, parameters are gathered again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import equal_units
from tests.support.ranks import HYBRID, Ranks, gloo

HOOKS: dict[str, Callable[[], Any]] = {
    "save_on_cpu": save_on_cpu,
    "identity": lambda: saved_tensors_hooks(lambda x: x, lambda x: x),
    "copies": lambda: saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x),
}


def gradients(mesh: fs.Mesh, hooks: str) -> Any:
    """Without and with hooks: by ``fs.grad`` and by ``backward()``, with what was communicated."""
    model, x = equal_units(), mesh.split(torch.ones(4 * mesh.size, 5).double().cumsum(0).sin())
    params = fs.shard(model, fs.plan(model, mesh))

    def loss(p: fs.Sharded) -> Tensor:
        return functional_call(model, fs.gather(p), (x,)).square().mean()

    def hooked(p: fs.Sharded) -> Tensor:
        with HOOKS[hooks]():
            return loss(p)

    results = []
    for of in (loss, hooked):
        with count_collectives() as seen:
            by_fs = fs.grad(of)(params)
        leaves = fs.Sharded({key: x.clone().requires_grad_() for key, x in params.items()}, params.layout)
        of(leaves).backward()
        results.append([dict(by_fs), {key: x.grad for key, x in leaves.items()}, dict(seen.by_kind)])
    return results


@pytest.mark.parametrize("ranks", gloo(2, HYBRID), ids=str)
@pytest.mark.parametrize("hooks", HOOKS)
def test_gradients_are_bitwise_those_without_hooks(hooks: str, ranks: Ranks) -> None:
    for (*expected, kinds), (*actual, kinds_with_hooks) in ranks.run(gradients, hooks):
        assert_trees_close(actual, expected, rtol=0, atol=0)
        if hooks != "copies":  # which keep the whole parameters, and need no second gather
            assert kinds_with_hooks == kinds
