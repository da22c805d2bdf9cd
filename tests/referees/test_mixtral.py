"""A layer of examples/mixture.py with place for all tokens is Mixtral's block, by transformers' own code."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.pool import run_ranks
from tests.support.scripts import example

pytest.importorskip("transformers")
mixture = partial(example, "mixture")


class Layer(nn.Module):
    """The experts, with as many places as tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = mixture().Experts().double()

    def forward(self, x: Tensor, way: Any) -> Tensor:
        return self.experts(x, x.shape[1], way)[0]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(2, 8, 11, 64, generator=generator, dtype=torch.float64)
    return x, weights


def by_shards(mesh: fs.Mesh) -> dict[str, Any]:
    layer, (x, weights) = Layer(), data()
    params, local = example("stacks").with_stacks(
        mesh, "expert", dict(layer.named_parameters()), ["experts.up", "experts.down"]
    )
    way = mixture().by_all_to_all(mesh["expert"])

    def loss(params: fs.Sharded, x: Tensor, weights: Tensor) -> Any:
        y = functional_call(layer, local(params), (x, way))
        return mesh.size * (y * weights).sum(), y

    def of_rank(params: fs.Sharded, x: Tensor, weights: Tensor) -> Any:
        (by_params, by_x), (_, y) = fs.grad_and_value(loss, (0, 1), has_aux=True)(params, x, weights)
        return by_params, *fs.collectives.all_gather((by_x / mesh.size, y), mesh)

    by_params, by_x, y = mesh.spmd(of_rank, out_dims=(0, None, None))(params, *mesh.split((x, weights)))
    return {"y": y, "x": by_x, **fs.gather(by_params, lazy=False)}


def by_transformers() -> dict[str, Any]:
    mixtral = import_module("transformers.models.mixtral.modeling_mixtral")
    module, layer, (x, weights) = mixture(), Layer(), data()
    config = mixtral.MixtralConfig(
        hidden_size=module.WIDTH,
        intermediate_size=module.HIDDEN,
        num_local_experts=module.EXPERTS,
        num_experts_per_tok=module.CHOSEN,
        experts_implementation="eager",
    )
    block = mixtral.MixtralSparseMoeBlock(config).double()
    names = {"router.weight": "gate.weight", "up": "experts.gate_up_proj", "down": "experts.down_proj"}
    names = {f"experts.{name}": theirs for name, theirs in names.items()}
    params = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Any:
        y = functional_call(block, {names[name]: p for name, p in params.items()}, (x,))
        return (y * weights).sum(), y

    with patch.object(Tensor, "float", lambda x: x):  # its router computes in float32 whatever the model is
        (by_params, by_x), (_, y) = grad_and_value(loss, (0, 1), has_aux=True)(params, x)
    return {"y": y, "x": by_x, **by_params}


def check(mesh: fs.Mesh) -> None:
    assert_trees_close(by_shards(mesh), by_transformers(), rtol=0, atol=1e-10)


def on_this_rank() -> None:
    check(fs.init_mesh({"expert": 2, "shard": 2}))


def test_a_layer_on_eight_simulated_ranks_is_that_of_mixtral() -> None:
    check(fs.simulated_mesh({"replicate": 2, "expert": 2, "shard": 2}))


def test_a_layer_on_four_gloo_ranks_is_that_of_mixtral() -> None:
    run_ranks(on_this_rank, 4)
