"""Parameters that a flat buffer cannot store are named before anything is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_shard as fs
from tests.support.models import two_layers
from tests.support.refusals import refused

MESHES = [fs.init_mesh(), fs.simulated_mesh(2)]
on_meshes = pytest.mark.parametrize("mesh", MESHES, ids=str)


class Quantized(Tensor):
    """As torchao's: int8 numbers and a scale, which say that they are float32."""

    data8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, data8: Tensor, scale: Tensor) -> Quantized:
        self = Tensor._make_wrapper_subclass(cls, data8.shape, dtype=scale.dtype)
        self.data8, self.scale = data8, scale
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        return cls(args[0].data8, args[0].scale)


class Packed(nn.Parameter):
    """Like those of bitsandbytes: bytes, with their meaning in another attribute."""


class Tagged(nn.Parameter):
    """A parameter with a name of its own and no behaviour."""


def quantized() -> nn.Sequential:
    model = two_layers((4, 4, 3))
    weight = Quantized(torch.ones(4, 4, dtype=torch.int8), torch.tensor(0.5))
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    model[0].bias.requires_grad_(False)
    return model


@on_meshes
def test_a_parameter_of_a_tensor_subclass_is_named(mesh: fs.Mesh) -> None:
    said = refused(fs.plan, quantized(), mesh)
    assert said.startswith(
        "ValueError: plan: 1 problem\n"
        "  '0.weight': a Quantized, which is a tensor subclass, and buffers hold plain tensors: plan the others alone"
    )
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


@on_meshes
@pytest.mark.parametrize("lazy", [None, False])
def test_a_sparse_gradient_of_a_gathered_parameter_is_an_error(mesh: fs.Mesh, lazy: bool | None) -> None:
    values = {"rows": torch.ones(9, 3), "scale": torch.ones(3)}
    params = fs.shard(values, fs.plan(values, mesh))

    def of_rows(params: fs.Sharded) -> Tensor:
        full = fs.gather(params, lazy=lazy)
        return (F.embedding(torch.tensor([1, 2, 1]), full["rows"], sparse=True) * full["scale"]).sum()

    assert "reshape is not implemented for sparse tensors" in refused(mesh.spmd(fs.grad(of_rows)), params)
    grads = {"rows": torch.eye(9, 3).to_sparse(), "scale": torch.ones(3)}
    layout = fs.plan(values, fs.init_mesh())
    assert "torch.sparse_coo, expected" in refused(fs.scatter_grads, grads, layout)


TIED: dict[str, tuple[Any, str]] = {
    "values": (torch.ones(3), "'b': tied to 'a' in the layout, but the values differ"),
    "dtype": (torch.zeros(3).double(), "'b': got shape (3,), torch.float64, expected (3,), torch.float32"),
    "meta": (torch.zeros(3, device="meta"), "'b': on the meta device, without values"),
}


@pytest.mark.parametrize("what", TIED)
def test_a_tied_name_is_checked_like_any_other(what: str) -> None:
    x = torch.zeros(3)
    layout = fs.plan({"a": x, "b": x}, fs.simulated_mesh(2))
    wrong, problem = TIED[what]
    with pytest.raises(ValueError, match="shard: 1 problem") as error:
        fs.shard({"a": x, "b": wrong}, layout)
    assert str(error.value).splitlines()[1] == f"  {problem}"
