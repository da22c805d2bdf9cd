"""What ``plan`` cannot store, and arguments that do not fit a layout: all problems at once, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..errors import name_problems, reject
from ..torch_internals.tensors import hooks_of
from .buffers import Slot
from .dtensor import form_of, local_part
from .layout import Layout
from .ranks import axis_sizes, rank_dims
from .trees import Sharded


def check_sharded(verb: str, tree: object, instead: str = "") -> None:
    """Raise unless ``tree`` is a ``Sharded``; ``instead`` ends the message."""
    if not isinstance(tree, Sharded):
        raise TypeError(f"{verb}: got {type(tree).__name__}, expected a Sharded{instead}.")


def check_layout(verb: str, layout: object) -> None:
    """Raise unless ``layout`` is a ``Layout``."""
    if not isinstance(layout, Layout):
        raise TypeError(f"{verb}: layout: got {type(layout).__name__}, expected a Layout from plan().")


def check_shards(
    verb: str, shards: Mapping[str, Any], layout: Layout, *, allow_none: bool = False, gradients: bool = False
) -> None:
    """Raise unless every buffer has one shard of its shape and dtype, with rank dims outside ``spmd``.

    ``gradients`` may have another precision than the buffer.
    """
    ranks = rank_dims(layout)
    problems = [] if shards.keys() == layout.buffers.keys() else name_problems(shards, layout.buffers)
    for key, x in shards.items():
        buffer = layout.buffers.get(key)
        if buffer is None or (allow_none and x is None):
            continue
        shape, dtype = (*ranks, buffer.shard_numel), _grad_dtype(x, buffer.dtype) if gradients else buffer.dtype
        if isinstance(x, Tensor) and x.shape == shape and x.dtype == dtype and x.layout is torch.strided:
            continue
        arithmetic = f" ({buffer.numel} elements / {buffer.num_shards} shards)" if buffer.num_shards > 1 else ""
        problems += _misfit(key, x, shape, dtype, arithmetic)
    if not problems:
        return
    expected = "with rank dims (outside spmd)" if ranks else "of one rank"
    advice = (
        f"Expected the shards {expected} of {layout!r}. Make the tree with shard(), from a layout of this mesh; a tree "
        "that was unpickled has a mesh of its own: move it with tree.on(mesh)."
    )
    reject(verb, problems, advice)


def check_whole(tensors: Mapping[str, Any], layout: Layout) -> None:
    """Raise unless ``tensors`` are the parameters of ``layout``, and have values."""
    reject("shard", source_problems({name: x for name, x in tensors.items() if isinstance(x, Tensor)}), "")
    problems, fit = _form_problems(tensors, layout)
    if layout.mesh.device.type != "meta":
        problems += [f"{name!r}: on the meta device, without values" for name in fit if tensors[name].is_meta]
    fit = {name for name in fit if not tensors[name].is_meta}
    problems += [
        f"{alias!r}: tied to {name!r} in the layout, but the values differ"
        for alias, name in layout.aliases
        if {alias, name} <= fit and not _same_values(local_part(tensors[alias]), local_part(tensors[name]))
    ]
    reject("shard", problems, "Shard the model that the layout was planned from, or plan a layout for this one.")


def check_model(verb: str, tensors: Mapping[str, Any], aliases: Mapping[str, str], layout: Layout) -> None:
    """Raise unless ``tensors``, tied by ``aliases``, have the names, shapes, dtypes and ties of ``layout``."""
    problems, _ = _form_problems(tensors, layout)
    planned = dict(layout.aliases)
    problems += [
        f"{name!r}: tied to {aliases.get(name)!r} in the model, to {planned.get(name)!r} in the layout"
        for name in tensors
        if aliases.get(name) != planned.get(name)
    ]
    reject(verb, problems, "Pass the model that the layout was planned from, or plan a layout for this one.")


def _form_problems(tensors: Mapping[str, Any], layout: Layout) -> tuple[list[str], list[str]]:
    """The problems of names, shapes and dtypes; and the names without problems."""
    problems = name_problems(tensors, layout.slots, allowed=dict(layout.aliases))
    owner_of = {name: name for name in layout.slots} | {a: name for a, name in layout.aliases if name in layout.slots}
    fit = []
    for name, owner in owner_of.items():
        if name in tensors:
            slot, x = layout.slots[owner], tensors[name]
            unfit = _misform(name, x, slot) or _misfit(name, local_part(x), slot.shape, slot.dtype)
            problems += unfit
            fit += [] if unfit else [name]
    return problems, fit


def check_grads(grads: Mapping[str, Any], layout: Layout) -> None:
    """Raise unless there is a gradient, or None, for every trainable parameter of ``layout``."""
    trainable = [name for name in layout.slots if layout.buffers[layout.key_of[name]].trainable]
    problems = name_problems(grads, trainable, allowed=layout.slots)
    for name in trainable:
        if (grad := grads.get(name)) is not None:
            slot, form = layout.slots[name], layout.slots[name].dtensor
            shape = form.shape if form else slot.shape  # placements may differ: they are redistributed
            unfit = _misform(name, grad, slot, any_placements=True)
            problems += unfit or _misfit(name, grad, shape, _grad_dtype(grad, slot.dtype))
    reject("scatter_grads", problems, "Pass the gradient of every trainable parameter of the layout; None means zeros.")


def check_ranked(grads: Mapping[str, Any], layout: Layout) -> None:
    """Raise unless gradients have the rank dims that simulated ranks have outside ``spmd``."""
    shapes = {name: (*axis_sizes(layout), *slot.shape) for name, slot in layout.slots.items()}
    problems = [
        f"{name!r}: got shape {tuple(x.shape)}, expected {shapes[name]}"
        for name, x in grads.items()
        if isinstance(x, Tensor) and name in shapes and tuple(x.shape) != shapes[name]
    ]
    advice = "Outside spmd, gradients carry leading rank dims. To slice whole values without a reduction, use shard()."
    reject("scatter_grads", problems, advice)


def _misform(name: str, x: Any, slot: Slot, any_placements: bool = False) -> list[str]:
    """The problem of a plain tensor in place of a DTensor, a DTensor in place of a plain one, or another DTensor."""
    got, expected = form_of(x), slot.dtensor
    if (got is None and expected is None) or not isinstance(x, Tensor):
        return []
    if got and expected and any_placements:
        got = replace(got, placements=expected.placements)
    if got == expected:
        return []
    what = f"a {got}" if got else f"a plain tensor of shape {tuple(x.shape)}"
    wanted = f"a {expected}" if expected else f"a plain tensor of shape {slot.shape}"
    return [f"{name!r}: got {what}, expected {wanted}"]


def _misfit(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, arithmetic: str = "") -> list[str]:
    if not isinstance(x, Tensor):
        return [f"{name!r}: got {type(x).__name__}, expected a tensor of shape {shape}, {dtype}{arithmetic}"]
    if x.layout is not torch.strided:
        return [f"{name!r}: got layout {x.layout}, expected a dense tensor (.to_dense()) of shape {shape}, {dtype}"]
    if tuple(x.shape) == shape and x.dtype == dtype:
        return []
    return [f"{name!r}: got shape {tuple(x.shape)}, {x.dtype}, expected {shape}, {dtype}{arithmetic}"]


def _same_values(a: Tensor, b: Tensor) -> bool:
    return a is b or a.data_ptr() == b.data_ptr() or torch.equal(a, b)


def _grad_dtype(grad: Any, stored: torch.dtype) -> torch.dtype:
    """The expected dtype: a gradient may have another precision than its parameter, but not another kind of number."""
    if (
        isinstance(grad, Tensor)
        and grad.is_complex() == stored.is_complex
        and grad.is_floating_point() == stored.is_floating_point
    ):
        return grad.dtype
    return stored


def source_problems(tensors: Mapping[str, Any]) -> list[str]:
    """Why ``tensors`` cannot be stored in flat buffers, by name, and what to do."""
    return [f"{name!r}: {problem}" for name, x in tensors.items() if (problem := _problem(x))]


def sparse_problems(model: nn.Module) -> list[str]:
    """Trainable embeddings whose gradients would be sparse, by the names of their weights."""
    return [
        f"{f'{prefix}.weight'.removeprefix('.')!r}: its gradient is sparse, and buffers are dense: build the "
        f"{type(module).__name__} with sparse=False"
        for prefix, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
    ]


def _problem(x: Any) -> str:
    if not isinstance(x, Tensor):
        return f"got {type(x).__name__}, expected a tensor"
    if type(x) is not Tensor and isinstance(x, (UninitializedParameter, UninitializedBuffer)):
        return "a lazy parameter without a shape yet; run the model once"
    if _is_special(x):
        return (
            f"a {type(x).__name__}, which is a tensor subclass, and buffers hold plain tensors: plan the others alone, "
            "as a mapping name -> tensor; functional_call takes this one from the model"
        )
    if x.layout != torch.strided:
        return f"layout {x.layout}; only strided tensors can be flattened"
    if isinstance(x, nn.Parameter) and (hooks := hooks_of(x)):
        return (
            f"has a hook ({', '.join(hooks)}), which would never run, as gradients are taken of other tensors: remove "
            "it, and apply to whole gradients what it did, before fs.scatter_grads"
        )
    return ""


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
