"""Models of other libraries with their own gradient checkpointing on: ten steps on two gloo ranks, as without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives, run_ranks
from tests.support.refusals import refused

STEPS = 10
Case = tuple[nn.Module, Mapping[str, Tensor], Callable[[Any], Tensor], Callable[[], object]]


def _tokens(size: int = 60, shape: tuple[int, int] = (4, 12)) -> Tensor:
    return torch.randint(3, size, shape, generator=torch.Generator().manual_seed(1))


def _images(size: int, channels: int = 3) -> Tensor:
    return torch.randn(4, channels, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _transformers(config: str, model: str, batch: Mapping[str, Tensor], **options: Any) -> Case:
    library = import_module("transformers")
    built = getattr(library, model)(getattr(library, config)(**options))
    return built, batch, lambda output: output.loss, built.gradient_checkpointing_enable


def llama() -> Case:
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    x = _tokens()
    return _transformers("LlamaConfig", "LlamaForCausalLM", {"input_ids": x, "labels": x}, **sizes, **heads)


def gpt2() -> Case:  # a head that is tied to the embedding, and dropout
    sizes = {"vocab_size": 60, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 4, "use_cache": False}
    x = _tokens()
    return _transformers("GPT2Config", "GPT2LMHeadModel", {"input_ids": x, "labels": x}, **sizes)


def t5() -> Case:  # an encoder and a decoder over one embedding, and dropout
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    rest = {"use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}
    x = _tokens()
    return _transformers(
        "T5Config", "T5ForConditionalGeneration", {"input_ids": x, "labels": x.flip(1)}, **sizes, **rest
    )


def vit() -> Case:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    images = {"image_size": 16, "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.1}
    batch = {"pixel_values": _images(16), "labels": torch.arange(4)}
    return _transformers("ViTConfig", "ViTForImageClassification", batch, **sizes, **images)


def _timm(name: str, batch: Tensor, **options: Any) -> Case:
    model = import_module("timm").create_model(name, **options)
    return model, {"x": batch}, lambda y: y.square().mean(), model.set_grad_checkpointing


def timm_vit() -> Case:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 5}
    return _timm("vit_tiny_patch16_224", _images(16), **sizes, drop_path_rate=0.1)


def timm_resnet() -> Case:  # BatchNorm inside of checkpointed stages
    return _timm("resnet10t", _images(32), num_classes=5)


def _diffusers(name: str, batch: Mapping[str, Tensor], **options: Any) -> Case:
    model = getattr(import_module("diffusers"), name)(**options)
    return model, batch, lambda output: output.sample.square().mean(), model.enable_gradient_checkpointing


def diffusers_unet() -> Case:
    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
    batch = {"sample": _images(8), "timestep": torch.tensor([3, 141, 592, 653])}
    return _diffusers("UNet2DModel", batch, **kinds, **sizes, attention_head_dim=8)


def diffusers_transformer() -> Case:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
    rest = {"num_embeds_ada_norm": 10, "norm_num_groups": 4, "dropout": 0.1}
    batch = {
        "hidden_states": _images(8, 4),
        "timestep": torch.tensor([3, 141, 592, 653]),
        "class_labels": torch.arange(4),
    }
    return _diffusers("DiTTransformer2DModel", batch, **sizes, **rest)


def _train(case: Callable[[], Case], checkpointed: bool, run: Callable[..., Any]) -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    mesh = fs.init_mesh()
    model, batch, loss_of, checkpoint = case()
    model.double().train()
    if checkpointed:
        checkpoint()
    layout = fs.plan(model, mesh)
    params, losses, kinds = fs.shard(model, layout), [], []
    for step in range(STEPS):
        torch.manual_seed(step)
        with count_collectives() as seen:
            grads, loss = fs.grad_and_value(lambda p, batch: loss_of(run(model, p, batch)))(params, mesh.split(batch))
        kinds.append(dict(seen.by_kind))
        params = fs.Sharded({key: params[key] - 0.02 * grads[key] for key in params}, layout)
        losses.append(fs.collectives.pmean(loss, mesh).item())
    return losses, dict(fs.gather(params, lazy=False)), kinds


def _bound(model: nn.Module, params: fs.Sharded, batch: Mapping[str, Tensor]) -> Any:
    return fs.bind(model, params)(**batch)


def _functional_call(model: nn.Module, params: fs.Sharded, batch: Mapping[str, Tensor]) -> Any:
    return functional_call(model, fs.gather(params), kwargs=dict(batch))


def train_on_this_rank(case: Callable[[], Case]) -> Any:
    refusal = refused(_train, case, True, _functional_call)
    return _train(case, False, _bound), _train(case, True, _bound), refusal


CASES: list[tuple[str, Callable[[], Case]]] = [
    ("transformers", llama),
    ("transformers", gpt2),
    ("transformers", t5),
    ("transformers", vit),
    ("timm", timm_vit),
    ("timm", timm_resnet),
    ("diffusers", diffusers_unet),
    ("diffusers", diffusers_transformer),
]


@pytest.mark.parametrize(("library", "case"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_ten_steps_with_checkpointing_are_bitwise_those_without(library: str, case: Callable[[], Case]) -> None:
    pytest.importorskip(library)
    for expected, actual, refusal in run_ranks(train_on_this_rank, 2, case, timeout=600.0):
        losses, params, kinds = expected
        assert losses[-1] < losses[0]
        assert actual[0] == losses
        assert_trees_close(actual[1], params, rtol=0, atol=0)
        assert [step["psum_scatter"] for step in actual[2]] == [step["psum_scatter"] for step in kinds]
        assert all(a["all_gather"] <= b["all_gather"] + 6 for a, b in zip(actual[2], kinds, strict=True))
        assert "functorch_shard.bind(model, params)(...)" in refusal
