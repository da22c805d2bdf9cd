"""A layer of examples/mixture.py with places for all tokens is Mixtral's block, by transformers' own code."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value

from functorch_shard.testing import assert_trees_close
from tests.support.scripts import example

pytest.importorskip("transformers")
NAMES = {"router.weight": "gate.weight", "up": "experts.gate_up_proj", "down": "experts.down_proj"}


def test_a_layer_on_whole_tensors_is_that_of_mixtral() -> None:
    """The example compares the layer on ranks with the one on whole tensors."""
    mixture, mixtral = example("mixture"), import_module("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(
        hidden_size=mixture.WIDTH,
        intermediate_size=mixture.HIDDEN,
        num_local_experts=mixture.EXPERTS,
        num_experts_per_tok=mixture.CHOSEN,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    layer, block = mixture.Experts().double(), mixtral.MixtralSparseMoeBlock(config).double()
    params = {name: p.detach() for name, p in layer.named_parameters()}
    x, weights = torch.randn(2, 8, 11, mixture.WIDTH, dtype=torch.float64)

    def ours(params: dict[str, Tensor], x: Tensor) -> Any:
        y, _ = functional_call(layer, params, (x, x.shape[1], mixture.on_whole_tensors))
        return (y * weights).sum(), y

    def theirs(params: dict[str, Tensor], x: Tensor) -> Any:
        y = functional_call(block, {NAMES[name]: p for name, p in params.items()}, (x,))
        return (y * weights).sum(), y

    with patch.object(Tensor, "float", lambda x: x):  # its router computes in float32 whatever the model is
        found, expected = (grad_and_value(fn, (0, 1), has_aux=True)(params, x) for fn in (ours, theirs))
    assert_trees_close(found, expected, rtol=0, atol=1e-10)
