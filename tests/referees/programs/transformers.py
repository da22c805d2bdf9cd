"""Models of transformers: trained, differentiated twice, generating, exported, and started on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from tests.referees.referee import Referee, Where, of_all
from tests.referees.training import Batch, Calling, Task, hessian_product, rows_of, trained

VOCABULARY, ROWS, LENGTH = 60, 4, 8
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {**SMALL, **HEADS, "use_cache": False}
IMAGES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Llama, tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "Qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 4}),
    "GPT-2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    "BERT": (
        "BertForMaskedLM",
        {**SMALL, "num_attention_heads": 2, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        | {"use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0},
    ),
    "Mixtral": (
        "MixtralForCausalLM",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    ),
    "ViT": ("ViTForImageClassification", {**IMAGES, "image_size": 8, "patch_size": 4, "num_labels": 5}),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, "num_mel_bins": 4, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
        | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
        | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24)
        | {"max_source_positions": 6, "max_target_positions": 12, "use_cache": False}
        | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    ),
    "Mamba": (
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "use_cache": False}
        | {"expand": 2, "conv_kernel": 3, "time_step_rank": 2},
    ),
}


def made(name: str, **options: Any) -> Any:
    library = import_module("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    kind = getattr(library, MODELS[name][0])
    model = kind(kind.config_class(**{**MODELS[name][1], **options}))
    if name == "GPT-2":  # of which nothing but the library's own loss is in float32
        model.loss_function = causal_loss
    return model


def causal_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def text() -> Batch:
    x = tokens()
    return {"input_ids": x, "labels": x}


def padded_text() -> Batch:
    """Rows of different lengths; what is padding has no label."""
    x, lengths = tokens(), torch.tensor([8, 5, 3, 7])
    mask = torch.arange(LENGTH) < lengths[:, None]
    return {"input_ids": x, "attention_mask": mask.long(), "labels": x.masked_fill(~mask, -100)}


def mask_of_every_pair() -> Batch:
    """The same, as a mask with a number for each pair of tokens."""
    batch = dict(padded_text())
    seen = batch["attention_mask"][:, None, None].bool() & torch.ones(LENGTH, LENGTH).tril().bool()
    return {**batch, "attention_mask": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float64).min)}


def pixels() -> Batch:
    x = torch.randn(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"pixel_values": x, "labels": torch.arange(ROWS)}


def sound() -> Batch:
    x = torch.randn(ROWS, 4, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"input_features": x, "labels": tokens()[:, :5]}


def loss_of(output: Any) -> Tensor:
    return output.loss


def task(name: str, batch: Any = text, checkpointing: bool = False, **options: Any) -> Task:
    method = "gradient_checkpointing_enable" if checkpointing else ""
    return Task(partial(made, name, **options), batch, loss_of, method, options.get("dtype", torch.float64))


def generated(where: Where) -> dict[str, Any]:
    torch.manual_seed(0)
    llama = made("Llama", use_cache=True, pad_token_id=0, eos_token_id=None, initializer_range=1.0).double()
    model = Calling(llama, lambda llama, x: llama.generate(x, max_new_tokens=5, do_sample=False, use_cache=True))
    prompts = {"x": tokens()[:, :3]}
    return {"each text": rows_of(where, model, prompts, lambda p, x: functional_call(model, p, (x,)))}


def exported(where: Where) -> dict[str, Any]:
    """Parameters and logits of a model that was written, and read by ``from_pretrained``."""
    model: Any = task("Llama, tied").made()
    with TemporaryDirectory() as folder:
        if isinstance(where, int):
            model.save_pretrained(folder)
            return _read(model, folder)
        folders = [f"{folder}/model"]
        if dist.is_initialized():
            dist.broadcast_object_list(folders)
        (directory,) = folders  # of the first rank
        fs.checkpoint.export_safetensors(directory, fs.shard(model, fs.plan(model, where)))
        model.config.save_pretrained(directory)
        result = _read(model, directory)
        if dist.is_initialized():
            dist.barrier()  # the directory stays until all have read it
        return result


def _read(model: Any, folder: str) -> Any:
    again = type(model).from_pretrained(folder, dtype=torch.float64)
    return of_all({"parameters": dict(again.named_parameters()), "logits": again(tokens()).logits})


def from_meta(where: Where, name: str) -> dict[str, Any]:
    """Parameters and buffers that the model's own initialization gives, from a model without values."""
    if isinstance(where, int):
        model = made(name)
        torch.manual_seed(3)
        with torch.no_grad():
            model.apply(model._init_weights)
        buffers = {name: x.expand(where, *x.shape) for name, x in model.named_buffers()}
        return {"parameters": dict(model.named_parameters()), **({"each buffer": buffers} if buffers else {})}
    with torch.device("meta"):
        model = made(name)
    params, buffers = fs.init(model, fs.plan(model, where), seed=3, init=model._init_weights)
    return {"parameters": fs.gather(params, lazy=False), **({"each buffer": buffers} if buffers else {})}


MASKED = "data-dependent control flow"
CHECKPOINTED = "saved tensor hooks"
SINGLE = 1e-6  # models that compute norms in float32, whatever they are given: their rounding is amplified
LLAMA_LIKE = ("Llama", "Llama, tied", "Qwen3")


def referee(name: str, batch: Any = text, also: str = "", batched: str = "", **options: Any) -> Referee:
    """One that trains a model."""
    tolerance = SINGLE if name in (*LLAMA_LIKE, "Mixtral", "Mamba", "T5") else 1e-10
    program = partial(trained, task(name, batch, **options))
    return Referee("transformers", f"{name}{also and ', '}{also}", program, batched=batched, tolerance=tolerance)


CHECKPOINTING = {"also": "checkpointing", "batched": CHECKPOINTED, "checkpointing": True}
PADDING = {"batch": padded_text, "also": "padding", "batched": MASKED}
REFEREES = [
    *map(referee, ("Llama", "Llama, tied", "Qwen3", "GPT-2", "BERT", "Mamba")),
    referee("ViT", pixels),
    referee("Whisper", sound),
    referee("Mixtral", experts_implementation="eager", batched=MASKED),
    referee("Mixtral", also="float32, grouped_mm", dtype=torch.float32),
    referee("Llama", **PADDING),
    referee("BERT", **PADDING),
    referee("T5", **PADDING),
    referee("Llama", mask_of_every_pair, "a mask of 4 dims"),
    referee("Llama", **CHECKPOINTING),
    referee("GPT-2", **CHECKPOINTING),
    referee("BERT", padded_text, **CHECKPOINTING | {"batched": MASKED}),
    referee("T5", padded_text, **CHECKPOINTING | {"batched": MASKED}),
    referee("Mixtral", experts_implementation="eager", **CHECKPOINTING),
    referee("ViT", pixels, **CHECKPOINTING),
    referee("Whisper", sound, **CHECKPOINTING),
    Referee(
        "transformers",
        "Llama, Hessian product",
        partial(hessian_product, task("Llama", attn_implementation="eager")),
        tolerance=SINGLE,
    ),
    *(
        Referee("transformers", f"{name}, from the meta device", partial(from_meta, name=name), tolerance=0.0)
        for name in ("Llama, tied", "GPT-2", "Mixtral", "BERT", "ViT", "T5")
    ),
    Referee("transformers", "Llama, generate", generated, batched=MASKED, tolerance=0.0),
    Referee("transformers", "Llama, tied, exported, from_pretrained", exported, tolerance=0.0),
]
