"""Adapters of peft on a frozen Llama: trained, switched off, merged, and read by peft."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from tests.referees.programs.transformers import SINGLE, loss_of, text, tokens
from tests.referees.programs.transformers import made as base
from tests.referees.referee import Referee, Where, of_all
from tests.referees.training import Calling, Task, rows_of, trained


def adapted(**options: Any) -> Any:
    """A Llama with adapters that change what it computes."""
    library = import_module("peft")
    torch.manual_seed(0)
    config = library.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "up_proj"], **options)
    model = library.get_peft_model(base("Llama"), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return model.double()


def without_adapters(where: Where) -> dict[str, Any]:
    def logits(model: Any, x: Tensor) -> Tensor:
        with model.disable_adapter():
            return model(x).logits

    model = Calling(adapted(), logits)
    return {"each logits": rows_of(where, model, {"x": tokens()}, lambda p, x: functional_call(model, p, (x,)))}


class AgainstTheBase(nn.Module):
    """What the adapters change, as losses of preferences compute it: the base model is the same one, without them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = adapted()

    def forward(self, input_ids: Tensor) -> Tensor:
        with torch.no_grad(), self.model.disable_adapter():
            before = self.model(input_ids).logits
        return (self.model(input_ids).logits - before + 0.1).square().mean()


def read_by_peft(where: Where, merge: bool) -> dict[str, Any]:
    """Logits of another model with the adapters, as peft takes them from a state dict, loads and merges them."""
    library, model, other = import_module("peft"), adapted(), adapted()
    full = model.state_dict()
    if not isinstance(where, int):
        full = dict(fs.gather(fs.shard(model, fs.plan(model, where)), lazy=False))
    with torch.no_grad():
        for name, p in other.named_parameters():
            if "lora_" in name:
                p.zero_()
    library.set_peft_model_state_dict(other, library.get_peft_model_state_dict(model, state_dict=full))
    return of_all({"logits": (other.merge_and_unload() if merge else other)(tokens()).logits})


def referee(name: str, program: Any, **options: Any) -> Referee:
    return Referee("peft", name, program, tolerance=SINGLE, **options)


IDS = partial(dict, input_ids=tokens())
WRITES = "Tensor.requires_grad_()"
REFEREES = [
    referee("LoRA", partial(trained, Task(adapted, text, loss_of))),
    referee("DoRA", partial(trained, Task(partial(adapted, use_dora=True), text, loss_of))),
    referee("LoRA, biases", partial(trained, Task(partial(adapted, bias="lora_only"), text, loss_of))),
    referee(
        "LoRA, checkpointing",
        partial(trained, Task(adapted, text, loss_of, "gradient_checkpointing_enable")),
        batched="saved tensor hooks",
    ),
    referee("disable_adapter", without_adapters, batched=WRITES),
    referee("LoRA against the base in one loss", partial(trained, Task(AgainstTheBase, IDS))),
    referee("adapters saved and loaded", partial(read_by_peft, merge=False)),
    referee("adapters loaded and merged", partial(read_by_peft, merge=True)),
]
