"""The blocks that are found in models of transformers are those that the models declare themselves."""

from __future__ import annotations

import pytest
import torch

import functorch_shard as fs

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIGS = {
    "Bert": SMALL,
    "GPT2": {"n_embd": 16, "n_layer": 3, "n_head": 2},
    "Llama": {**SMALL, "num_key_value_heads": 2},
    "Mixtral": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 2},
    "T5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2},
    "ViT": SMALL,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_block_that_a_model_wants_on_one_device_is_a_unit(name: str) -> None:
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**CONFIGS[name]))
    declared = {path for path, child in model.named_modules() if type(child).__name__ in model._no_split_modules}
    assert len(declared) >= 3
    assert declared <= {unit.name for unit in fs.plan(model, fs.simulated_mesh(2), units="blocks").units}
