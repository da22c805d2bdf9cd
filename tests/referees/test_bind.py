"""Models of other libraries, bound: gradients of the unsharded program by fs.grad and backward(), also checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.testing import run_ranks
from tests.referees.test_checkpointing import (
    Case,
    _images,
    _tokens,
    _transformers,
    diffusers_unet,
    gpt2,
    llama,
    t5,
    timm_resnet,
    timm_vit,
    vit,
)


def bert() -> Case:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    x = _tokens()
    batch = {"input_ids": x, "labels": x}
    return _transformers("BertConfig", "BertForMaskedLM", batch, **sizes, intermediate_size=48)


def mixtral() -> Case:
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "use_cache": False}
    eager = {"experts_implementation": "eager"}  # torch's grouped kernel has no float64
    x = _tokens()
    return _transformers(
        "MixtralConfig", "MixtralForCausalLM", {"input_ids": x, "labels": x}, **sizes, **heads, **eager
    )


def whisper() -> Case:
    sizes = {"vocab_size": 60, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    rest = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "use_cache": False, "decoder_start_token_id": 1}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    x = torch.randn(4, 8, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = {"input_features": x, "labels": _tokens()}
    return _transformers("WhisperConfig", "WhisperForConditionalGeneration", batch, **sizes, **layers, **rest, **ends)


def lora() -> Case:
    model, batch, loss, _ = llama()
    peft = import_module("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    return adapted, batch, loss, adapted.gradient_checkpointing_enable


class _Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.flow = import_module("zuko").flows.NSF(2, 4, transforms=2, hidden_features=[16])

    def forward(self, x: Tensor) -> Any:
        return self.flow(self.embed(x))


def zuko_flow() -> Case:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return _Flow(), {"x": x}, lambda flow: -flow.log_prob(x[:2, :2]).mean(), lambda: None


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, 6, 2, bidirectional=True, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


def lstm() -> Case:
    return _Tagger(), {"x": _images(8)[:, 0]}, lambda y: y.square().mean(), lambda: None


CASES: list[tuple[str, Callable[[], Case]]] = [
    *(("transformers", case) for case in (llama, gpt2, t5, bert, mixtral, vit, whisper)),
    *(("timm", case) for case in (timm_vit, timm_resnet)),
    ("diffusers", diffusers_unet),
    ("peft", lora),
    ("zuko", zuko_flow),
    ("torch", lstm),
]


def _made(case: Callable[[], Case], checkpointed: bool) -> Case:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, batch, loss_of, checkpoint = case()
    model.double().train()
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)  # ranks draw other numbers than one process does
    if checkpointed:
        checkpoint()
    return model, batch, loss_of, checkpoint


def unsharded(case: Callable[[], Case], num_ranks: int) -> dict[str, Tensor]:
    model, batch, loss_of, _ = _made(case, False)
    for rank in range(num_ranks):
        (loss_of(model(**{n: x.chunk(num_ranks)[rank] for n, x in batch.items()})) / num_ranks).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }


def differences(case: Callable[[], Case]) -> dict[str, float]:
    """Relative to the largest element of each parameter's gradient; the model is untouched."""
    mesh, results = fs.init_mesh(), {}
    expected = unsharded(case, mesh.size)
    for checkpointed in (False, True):
        model, batch, loss_of, _ = _made(case, checkpointed)
        before = [(n, id(x), x._version) for n, x in model.state_dict(keep_vars=True).items()]
        params = fs.shard(model, fs.plan(model, mesh))
        trained, frozen = fs.partition(params)
        part = mesh.split(dict(batch))

        def loss(p: fs.Sharded, model: Any = model, f: Any = frozen, part: Any = part, of: Any = loss_of) -> Tensor:
            return of(fs.bind(model, fs.gather(p, f) if len(f) else p)(**part))

        leaves = fs.Sharded({key: x.clone().requires_grad_() for key, x in trained.items()}, trained.layout)
        loss(leaves).backward()
        plain = {key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in leaves.items()}
        for how, grads in (("fs.grad", fs.grad(loss)(trained)), ("backward", fs.Sharded(plain, trained.layout))):
            full = fs.gather(grads, lazy=False)
            far = [(full[n] - x).abs().max() / x.abs().max().clamp(min=1e-6) for n, x in expected.items() if n in full]
            assert len(far) == len(full) > 0
            results[how + (", checkpointed" if checkpointed else "")] = max(far).item()
        assert [(n, id(x), x._version) for n, x in model.state_dict(keep_vars=True).items()] == before
    return results


@pytest.mark.parametrize(("library", "case"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_gradients_of_a_bound_model_are_those_of_the_unsharded_program(library: str, case: Callable[[], Case]) -> None:
    pytest.importorskip(library)
    for results in run_ranks(differences, 2, case, timeout=600.0):
        assert max(results.values()) < 1e-9, results
