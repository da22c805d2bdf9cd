"""What ``plan`` cannot store, and values that do not fit a layout: all problems at once, before anything is sent."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..errors import name_problems, reject
from ..torch_internals.autograd import hooks_of
from .buffers import DTensorForm, Slot
from .layout import Layout, rank_dims
from .trees import grad_dtype, misfit

_GRADS = (
    "Pass the gradient of every trainable parameter of the layout, outside of spmd with rank dims; None means zeros. "
    "To slice whole values, use shard()."
)
_OTHER_MODEL = "Pass the model that the layout was planned from, or plan a layout for this one."


def form_of(x: object) -> DTensorForm | None:
    """The form of a DTensor; ``None`` for anything else."""
    module = sys.modules.get("torch.distributed.tensor")  # which takes half a second to import
    if module is None or not isinstance(x, module.DTensor):
        return None
    from ..tensor_parallel.forms import form

    return form(x)


def local_part(x: Any) -> Any:
    """This rank's part of a DTensor, detached; anything else unchanged."""
    if form_of(x) is None:
        return x
    with torch.no_grad():
        return x.to_local().detach()  # to_local of a Parameter is a Parameter


def check_whole(tensors: Mapping[str, Any], layout: Layout) -> None:
    """Raise unless ``tensors`` are the parameters of ``layout``, and have values."""
    reject("shard", source_problems({name: x for name, x in tensors.items() if isinstance(x, Tensor)}), "")
    problems, fit = _form_problems(tensors, layout)
    valued = {name for name in fit if not tensors[name].is_meta}
    if layout.mesh.device.type != "meta":
        problems += [f"{name!r}: on the meta device, without values" for name in fit if name not in valued]
    for alias, name in layout.aliases:
        if {alias, name} <= valued:
            a, b = local_part(tensors[alias]), local_part(tensors[name])
            if not (a is b or a.is_set_to(b) or torch.equal(a, b)):  # NaN is not equal to itself
                problems.append(f"{alias!r}: tied to {name!r} in the layout, but the values differ")
    reject("shard", problems, _OTHER_MODEL)


def check_model(verb: str, tensors: Mapping[str, Any], aliases: Mapping[str, str], layout: Layout) -> None:
    """Raise unless ``tensors``, tied by ``aliases``, have the names, shapes, dtypes and ties of ``layout``."""
    problems, _ = _form_problems(tensors, layout)
    planned = dict(layout.aliases)
    problems += [
        f"{name!r}: tied to {aliases.get(name)!r} in the model, to {planned.get(name)!r} in the layout"
        for name in tensors
        if aliases.get(name) != planned.get(name)
    ]
    reject(verb, problems, _OTHER_MODEL)


def _form_problems(tensors: Mapping[str, Any], layout: Layout) -> tuple[list[str], list[str]]:
    """The problems of names, shapes and dtypes; and the names without problems."""
    problems = name_problems(tensors, layout.slots, allowed=dict(layout.aliases))
    owner_of = {name: name for name in layout.slots} | {a: name for a, name in layout.aliases if name in layout.slots}
    fit = []
    for name, owner in owner_of.items():
        if name in tensors:
            slot, x = layout.slots[owner], tensors[name]
            unfit = _misform(name, x, slot) or misfit(name, local_part(x), slot.shape, slot.dtype)
            problems += unfit
            fit += [] if unfit else [name]
    return problems, fit


def check_grads(grads: Mapping[str, Any], layout: Layout) -> None:
    """Raise unless there is a gradient, or None, for every trainable parameter, with rank dims outside ``spmd``."""
    ranks = rank_dims(layout)
    trainable = [name for name in layout.slots if layout.buffers[layout.key_of[name]].trainable]
    problems = name_problems(grads, trainable, allowed=layout.slots)
    for name in trainable:
        if (grad := grads.get(name)) is not None:
            slot, form = layout.slots[name], layout.slots[name].dtensor
            shape = (*ranks, *(form.shape if form else slot.shape))  # placements may differ: they are redistributed
            unfit = _misform(name, grad, slot, any_placements=True)
            problems += unfit or misfit(name, grad, shape, grad_dtype(grad, slot.dtype))
    reject("scatter_grads", problems, _GRADS)


def _misform(name: str, x: Any, slot: Slot, any_placements: bool = False) -> list[str]:
    """The problem of a plain tensor in place of a DTensor, a DTensor in place of a plain one, or another DTensor."""
    got, expected = form_of(x), slot.dtensor
    if got and expected and any_placements:
        got = replace(got, placements=expected.placements)
    if got == expected or not isinstance(x, Tensor):
        return []
    what = f"a {got}" if got else f"a plain tensor of shape {tuple(x.shape)}"
    wanted = f"a {expected}" if expected else f"a plain tensor of shape {slot.shape}"
    return [f"{name!r}: got {what}, expected {wanted}"]


def source_problems(tensors: Mapping[str, Any]) -> list[str]:
    """Why ``tensors`` cannot be stored in flat buffers, by name, and what to do."""
    return [f"{name!r}: {problem}" for name, x in tensors.items() if (problem := _problem(x))]


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
