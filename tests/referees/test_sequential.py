"""Transformers' BERT with padding masks on simulated ranks that run one after the other: the losses of gloo ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.own_programs import tokens, trained
from tests.support.ranks import gloo, sequential


def bert() -> nn.Module:
    library = import_module("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = library.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16)
    torch.manual_seed(0)
    return library.BertForMaskedLM(config)


def masked_language_model(mesh: fs.Mesh) -> Any:
    model = bert()

    def loss(params: fs.Sharded, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, lengths = batch
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        inputs = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
        return functional_call(model, fs.gather(params), (), inputs).loss

    return trained(mesh, model, loss, tokens(mesh, ragged=True))


def test_bert_with_a_padding_mask_has_the_losses_of_gloo_ranks() -> None:
    pytest.importorskip("transformers")
    (here,), (there,) = sequential(2), gloo(2)
    for rank, ((losses, parameters), expected) in enumerate(
        zip(here.run(masked_language_model), there.run(masked_language_model), strict=True)
    ):
        assert [of_step[rank] for of_step in losses] == expected[0]
        assert_trees_close(parameters, expected[1], rtol=0, atol=0)
    assert "kind='sequential'" in str(refused_by_a_vmap())


def refused_by_a_vmap() -> BaseException:
    """What the same program says on batched ranks."""
    model, mesh = bert(), fs.simulated_mesh(2)
    params = fs.shard(model, fs.plan(model, mesh))
    ids, mask = torch.ones(2, 3, 5, dtype=torch.long), torch.ones(2, 3, 5, dtype=torch.long)
    forward = mesh.spmd(lambda params, ids, mask: functional_call(model, fs.gather(params), (ids, mask)).logits)
    with pytest.raises(RuntimeError) as caught:
        forward(params, ids, mask)
    return caught.value
