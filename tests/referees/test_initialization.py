"""Models of transformers start on the meta device by their own ``_init_weights``, as a whole model on the CPU does."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import on_meta

HEADS = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16}),
    "LlamaForCausalLM": ("LlamaConfig", {**HEADS, "num_key_value_heads": 2, "vocab_size": 50}),
    "MixtralForCausalLM": ("MixtralConfig", {**HEADS, "num_key_value_heads": 2, "vocab_size": 50}),
    "BertModel": ("BertConfig", {**HEADS, "vocab_size": 50}),
    "ViTModel": ("ViTConfig", {**HEADS, "image_size": 8, "patch_size": 4}),
    "T5Model": ("T5Config", {"num_layers": 2, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 2, "vocab_size": 50}),
}


@pytest.mark.parametrize("model", MODELS)
def test_values_are_those_of_the_models_own_initialization(model: str) -> None:
    pytest.importorskip("transformers")
    library = import_module("transformers")
    config, options = MODELS[model]

    def make() -> Any:
        return getattr(library, model)(getattr(library, config)(**options))

    whole, meta = make(), on_meta(make)
    torch.manual_seed(5)
    with torch.no_grad():
        whole.apply(whole._init_weights)
    layout = fs.plan(meta, fs.simulated_mesh(3))
    params, buffers = fs.init(meta, layout, seed=5, init=meta._init_weights)
    assert_trees_close(dict(fs.gather(params)), dict(whole.named_parameters()), rtol=0, atol=0)
    assert_trees_close({name: x[0] for name, x in buffers.items()}, dict(whole.named_buffers()), rtol=0, atol=0)
