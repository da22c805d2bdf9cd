"""Which tensors can be parameters of a layout: what ``plan`` and ``shard`` refuse, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..torch_internals.tensors import hooks_of
from .dtensor import form_of

_ADVICE = {
    "subclass": "For a model with quantized or other special weights, plan the trainable parameters alone, as a "
    "mapping name -> tensor: functional_call takes the others from the model.",
    "hook": "Remove hooks of parameters (handle.remove()), and apply to the gradients what they did: fs.grad with "
    "respect to a Full returns whole gradients by name, and fs.scatter_grads shards them.",
    "sparse": "Build the model with sparse=False.",
}


def source_problems(tensors: Mapping[str, Any]) -> tuple[list[str], str]:
    """Why ``tensors`` cannot be stored in flat buffers, by name, and what to do."""
    found = [(name, *problem) for name, x in tensors.items() if (problem := _problem(x))]
    advice = dict.fromkeys(_ADVICE[kind] for _, kind, _ in found if kind in _ADVICE)
    return [f"{name!r}: {text}" for name, _, text in found], " ".join(advice)


def sparse_problems(model: nn.Module) -> tuple[list[str], str]:
    """Trainable embeddings whose gradients would be sparse, by the names of their weights."""
    names = [
        f"{prefix}.weight".removeprefix(".")
        for prefix, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
    ]
    text = "of an embedding with sparse=True: its gradient is a sparse tensor, and buffers are dense"
    return [f"{name!r}: {text}" for name in names], _ADVICE["sparse"] if names else ""


def _problem(x: Any) -> tuple[str, str] | None:
    """The kind of problem and its text."""
    if not isinstance(x, Tensor):
        return "type", f"got {type(x).__name__}, expected a tensor"
    if type(x) is not Tensor and isinstance(x, (UninitializedParameter, UninitializedBuffer)):
        return "lazy", "a lazy parameter without a shape yet; run the model once"
    if _is_special(x):
        return "subclass", f"a {type(x).__name__}, which is a tensor subclass; a flat buffer holds plain tensors"
    if x.layout != torch.strided:
        return "layout", f"layout {x.layout}; only strided tensors can be flattened"
    if isinstance(x, nn.Parameter) and (hooks := hooks_of(x)):
        return "hook", f"has a hook ({', '.join(hooks)}), which would never run: gradients are taken of other tensors"
    return None


def _is_special(x: Tensor) -> bool:
    """Whether ``x`` wraps other tensors, or is a parameter of a class with its own dispatch."""
    cls: Any = type(x)
    plain: Any = nn.Parameter
    if form_of(x) is not None or cls in (Tensor, plain):
        return False
    if hasattr(cls, "__tensor_flatten__"):
        return True
    behaves = (
        cls.__torch_dispatch__ != plain.__torch_dispatch__
        or cls.__torch_function__ != plain.__torch_function__
        or not (x.is_floating_point() or x.is_complex())  # packed, for example by bitsandbytes
    )
    return isinstance(x, nn.Parameter) and behaves
