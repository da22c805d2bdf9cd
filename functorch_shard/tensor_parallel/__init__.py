"""Tensor parallelism: parameters that are DTensors over axes of the device mesh outside of the mesh.

Note [DTensor]: this rank's local part, a plain tensor, is what is sharded, gathered and reduced. ``plan`` records the
shape and placements of the DTensor, and ``gather`` makes a DTensor of the gathered local part, which may be lazy:
operations of the DTensor use the lazy tensor, and views of it stay lazy. A gradient is returned in the placements of
its parameter: a partial gradient is summed over the axis where it becomes a local part. ``forms`` describes DTensors.

Imports ``layout`` and below; ``sharding`` imports it where a layout has DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..layout.buffers import DTensorForm
from ..layout.layout import Layout
from ..torch_internals.autograd import Function, differentiate_at_once, in_transform
from .forms import placements_of


def with_dtensors(parts: Mapping[str, Tensor], layout: Layout) -> Mapping[str, Tensor]:
    """``parts`` by name, with DTensors of those that are local parts; twice differentiable."""
    if in_transform() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "gather: the layout has DTensors, which torch.func transforms do not support. Differentiate with fs.grad, "
            "fs.grad_and_value or torch.autograd, outside of other transforms."
        )
    forms = {name: slot.dtensor for name, slot in layout.slots.items() if slot.dtensor}
    meshes = {axes: mesh.device_mesh for axes, mesh in layout.tensor_meshes.items()}
    whole = {name: _Assemble.apply(parts[name], meshes[form.axes], form) for name, form in forms.items()}
    differentiate_at_once(whole.values())
    return {**parts, **whole}


def local_grads(grads: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The local parts of gradients, in the placements of their parameters; differentiable."""
    forms = {name: layout.slots[name].dtensor for name in grads if name in layout.slots}
    return {name: _local(grad, form) if (form := forms.get(name)) else grad for name, grad in grads.items()}


def _local(grad: Any, form: DTensorForm) -> Any:
    return None if grad is None else grad.redistribute(placements=placements_of(form)).to_local()


class _Assemble(Function):
    """A local part to its DTensor: ``DTensor.from_local`` with a second derivative.

    In torch 2.13 the gradient of ``from_local`` has no graph where it was partial, so second derivatives are lost.
    """

    @staticmethod
    def forward(part: Tensor, device_mesh: Any, form: DTensorForm) -> Tensor:
        stride = torch.empty(form.shape, device="meta").stride()
        shape, placements = torch.Size(form.shape), placements_of(form)
        return DTensor.from_local(part, device_mesh, placements, run_check=False, shape=shape, stride=stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *_, ctx.form = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _local(grad, ctx.form), None, None
