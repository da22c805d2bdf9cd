"""Parameters that a flat buffer cannot store are named before anything is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import functorch_shard as fs
from tests.support.models import two_layers
from tests.support.refusals import refused

MESHES = [fs.init_mesh(), fs.simulated_mesh(2)]
on_meshes = pytest.mark.parametrize("mesh", MESHES, ids=str)


class Packed(nn.Parameter):
    """Like those of bitsandbytes: bytes, with their meaning in another attribute."""


class Tagged(nn.Parameter):
    """A parameter with a name of its own and no behaviour."""


@on_meshes
def test_a_parameter_of_a_tensor_subclass_is_named(mesh: fs.Mesh) -> None:
    quantized = {"w": nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))}
    assert "'w': a TwoTensor, which is a tensor subclass" in refused(fs.plan, quantized, mesh)
    packed = {"w": Packed(torch.ones(3, dtype=torch.uint8), requires_grad=False), "b": nn.Parameter(torch.ones(2))}
    assert "'w': a Packed, which is a tensor subclass" in refused(fs.plan, packed, mesh)
    fs.shard({"w": Tagged(torch.ones(3))}, fs.plan({"w": Tagged(torch.ones(3))}, mesh))


@on_meshes
def test_hooks_that_would_never_run_are_named(mesh: fs.Mesh) -> None:
    model: Any = two_layers()
    layout = fs.plan(model, mesh)
    handles = [
        model[0].weight.register_hook(lambda grad: grad * 0),
        model[2].bias.register_post_accumulate_grad_hook(lambda p: None),
    ]
    for verb, said in {"plan": refused(fs.plan, model, mesh), "shard": refused(fs.shard, model, layout)}.items():
        assert said.startswith(f"ValueError: {verb}: 2 problems\n  '0.weight': has a hook (register_hook), which would")
        assert "'2.bias': has a hook (register_post_accumulate_grad_hook), which would never run" in said
    for handle in handles:
        handle.remove()
    fs.shard(model, fs.plan(model, mesh))


def test_a_sparse_gradient_is_refused() -> None:
    grads = {"rows": torch.eye(9, 3).to_sparse()}
    text = refused(fs.scatter_grads, grads, fs.plan({"rows": torch.ones(9, 3)}, fs.init_mesh()))
    assert "'rows': got shape (9, 3), torch.float32, torch.sparse_coo, expected (9, 3), torch.float32" in text


TIED: dict[str, tuple[Any, str]] = {
    "values": (torch.ones(3), "'b': tied to 'a' in the layout, but the values differ"),
    "dtype": (torch.zeros(3).double(), "'b': got shape (3,), torch.float64, expected (3,), torch.float32"),
    "meta": (torch.zeros(3, device="meta"), "'b': on the meta device, without values"),
}


@pytest.mark.parametrize("what", TIED)
def test_a_tied_name_is_checked_like_any_other(what: str) -> None:
    x = torch.tensor([0, 1, torch.nan])
    layout = fs.plan({"a": x, "b": x}, fs.simulated_mesh(2))
    fs.shard({"a": x, "b": x.view(3)}, layout)  # one memory is one value, NaN too
    wrong, problem = TIED[what]
    text = refused(fs.shard, {"a": x, "b": wrong}, layout)
    assert text.splitlines()[:2] == ["ValueError: shard: 1 problem", f"  {problem}"]
