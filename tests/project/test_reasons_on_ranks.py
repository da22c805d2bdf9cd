"""What README says of FSDP2 beside this library, tried with FSDP2 itself on two gloo ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, jvp, vmap

from functorch_shard.testing import run_ranks

README = Path(__file__).parents[2] / "README.md"


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return model


def loss(model: nn.Module, params: dict[str, Any], x: Tensor) -> Tensor:
    return functional_call(model, params, (x,)).square().mean()


def hessian_vector_product(model: nn.Module, params: dict[str, Any], x: Tensor) -> Any:
    return jvp(grad(lambda p: loss(model, p, x)), (params,), (params,))


def gradients_of_samples(model: nn.Module, params: dict[str, Any], x: Tensor) -> Any:
    return vmap(lambda row: grad(lambda p: loss(model, p, row[None]))(params))(x)


ROWS: dict[str, Callable[[nn.Module, dict[str, Any], Tensor], Any]] = {
    "`functional_call` with a dict of tensors": loss,
    "`torch.func.grad` by parameters": lambda model, params, x: grad(lambda p: loss(model, p, x))(params),
    "`jvp`, forward mode": lambda model, params, x: jvp(lambda p: loss(model, p, x), (params,), (params,)),
    "Hessian-vector products": hessian_vector_product,
    "gradients of each sample, `vmap(grad(...))`": gradients_of_samples,
    "`deepcopy`, moving averages of parameters": lambda model, params, x: copy.deepcopy(model),
}


def outcome(program: Callable[[nn.Module, dict[str, Any], Tensor], Any]) -> str:
    """Of parameters that are three times those of a model which was called before."""
    model, x = sharded(), torch.ones(4, 5)
    own = model(x).square().mean()
    params = {name: 3 * p.detach() for name, p in model.named_parameters()}
    try:
        result = program(model, params, x)
    except Exception:
        return "raises"
    if isinstance(result, Tensor):
        return "takes the model's own values" if torch.equal(result, own) else "right"
    return "zeros" if not any(leaf.to_local().any() for leaf in result.values()) else "right"


def outcomes() -> dict[str, str]:
    return {row: outcome(program) for row, program in ROWS.items()}


@cache
def found() -> dict[str, str]:
    return run_ranks(outcomes, 2)[0]


@pytest.mark.parametrize("row", ROWS)
def test_fsdp2_does_what_readme_says(row: str) -> None:
    says = re.search(rf"^\| {re.escape(row)} \| (.*?) \|", README.read_text(), re.MULTILINE)
    assert says is not None
    assert found()[row] == says[1]
