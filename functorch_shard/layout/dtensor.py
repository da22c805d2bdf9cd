"""DTensors: parameters that tensor parallelism distributes over axes of the device mesh outside of the mesh.

Note [DTensor]: this rank's local part, a plain tensor, is what is sharded, gathered and reduced. ``plan`` records the
shape and placements of the DTensor, and ``gather`` makes a DTensor of the gathered local part, which may be lazy:
operations of the DTensor use the lazy tensor, and views of it stay lazy. A gradient is returned in the placements of
its parameter: a partial gradient is summed over the axis where it becomes a local part.

``torch.distributed.tensor`` takes half a second to import, and is only imported after the program has made a DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..mesh.mesh import Mesh
from ..torch_internals.autograd import Function, differentiate_at_once
from ..torch_internals.transforms import in_transform
from .dtensor_spec import DTensorForm
from .layout import Layout


def is_dtensor(x: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def form_of(x: Any) -> DTensorForm | None:
    """The form of a DTensor; ``None`` for anything else."""
    if not is_dtensor(x):
        return None
    names = x.device_mesh.mesh_dim_names or [f"dim {i}" for i in range(x.device_mesh.ndim)]
    placements = tuple(_text(placement) for placement in x.placements)
    return DTensorForm(tuple(x.shape), placements, tuple(zip(names, x.device_mesh.shape, strict=True)))


def local_part(x: Any) -> Any:
    """This rank's part of a DTensor, detached; anything else unchanged."""
    if not is_dtensor(x):
        return x
    with torch.no_grad():
        return x.to_local().detach()  # to_local of a Parameter is a Parameter


def cut_out(x: Tensor, form: DTensorForm | None, layout: Layout) -> Tensor:
    """This rank's part of the whole value of a DTensor; anything else unchanged."""
    if form is None:
        return x
    place = layout.tensor_meshes[form.axes].coordinate
    ranges = zip(form.local_start(place), form.local_shape(place), strict=True)
    return x[tuple(slice(start, start + size) for start, size in ranges)]


def unfit_dtensor(x: Any, mesh: Mesh) -> str:
    """Why a layout on ``mesh`` cannot hold the DTensor ``x``; empty if it can."""
    form = form_of(x)
    if form is None:
        return ""
    if x.device_mesh.mesh_dim_names is None:
        return f"a {form}, whose device mesh has no mesh_dim_names"
    if own := [name for name in form.axis_names if name in mesh.axes]:
        return f"a {form}, but the mesh itself has the axis {own[0]!r}; pass its full_tensor()"
    if odd := [text for text in form.placements if text != "R" and not text.startswith("S(")]:
        return f"a {form}; a parameter is Shard or Replicate, not {odd[0]}"
    try:
        known = mesh.sibling(*form.axis_names).device_mesh == x.device_mesh
    except KeyError as error:
        return f"a {form}; {error.args[0]}"
    return "" if known else f"a {form}, but not on the ranks of those axes of the device mesh that {mesh} is a slice of"


def with_dtensors(parts: Mapping[str, Tensor], layout: Layout) -> Mapping[str, Tensor]:
    """``parts`` by name, with DTensors of those that are local parts; twice differentiable."""
    whole = {name: _assemble(parts[name], slot.dtensor, layout) for name, slot in layout.slots.items() if slot.dtensor}
    differentiate_at_once(whole.values())
    return {**parts, **whole}


def local_grads(grads: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The local parts of gradients, in the placements of their parameters; differentiable."""
    forms = {name: layout.slots[name].dtensor for name in grads if name in layout.slots}
    return {name: _local(grad, form) if (form := forms.get(name)) else grad for name, grad in grads.items()}


def _assemble(part: Tensor, form: DTensorForm, layout: Layout) -> Tensor:
    if in_transform() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "gather: the layout has DTensors, which torch.func transforms do not support. Differentiate with fs.grad, "
            "fs.grad_and_value or torch.autograd, outside of other transforms."
        )
    return _Assemble.apply(part, layout.tensor_meshes[form.axes].device_mesh, form)


def _local(grad: Any, form: DTensorForm) -> Any:
    return None if grad is None else grad.redistribute(placements=_placements(form)).to_local()


class _Assemble(Function):
    """A local part to its DTensor: ``DTensor.from_local`` with a second derivative.

    In torch 2.13 the gradient of ``from_local`` has no graph where it was partial, so second derivatives are lost.
    """

    @staticmethod
    def forward(part: Tensor, device_mesh: Any, form: DTensorForm) -> Tensor:
        from torch.distributed.tensor import DTensor

        stride = torch.empty(form.shape, device="meta").stride()
        shape, placements = torch.Size(form.shape), _placements(form)
        return DTensor.from_local(part, device_mesh, placements, run_check=False, shape=shape, stride=stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *_, ctx.form = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _local(grad, ctx.form), None, None


def _text(placement: Any) -> str:
    from torch.distributed.tensor import Replicate, Shard

    known = f"S({placement.dim})" if type(placement) is Shard else "R"
    return known if type(placement) in (Replicate, Shard) else repr(placement)


def _placements(form: DTensorForm) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if text == "R" else Shard(int(text[2:-1])) for text in form.placements]
