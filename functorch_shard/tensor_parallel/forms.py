"""The form of a DTensor, which a slot holds, and whether a layout can hold the DTensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..errors import axes_text
from ..layout.buffers import DTensorForm, Slot
from ..mesh.mesh import Mesh

Meshes = Mapping[tuple[tuple[str, int], ...], Mesh]


def form(x: Any) -> DTensorForm:
    """The form of a DTensor."""
    names = x.device_mesh.mesh_dim_names or [f"dim {i}" for i in range(x.device_mesh.ndim)]
    placements = tuple(
        f"S({p.dim})" if type(p) is Shard else "R" if type(p) is Replicate else repr(p) for p in x.placements
    )
    return DTensorForm(tuple(x.shape), placements, tuple(zip(names, x.device_mesh.shape, strict=True)))


def placements_of(form: DTensorForm) -> list[Any]:
    """The placements that :func:`form` described."""
    return [Replicate() if text == "R" else Shard(int(text[2:-1])) for text in form.placements]


def cut_out(x: Tensor, form: DTensorForm, meshes: Meshes) -> Tensor:
    """This rank's part of the whole value of a DTensor."""
    ranges = zip(*form.part_at(meshes[form.axes].coordinate), strict=True)
    return x[tuple(slice(start, start + size) for size, start in ranges)]


def unfit(x: Any, mesh: Mesh) -> str:
    """Why a layout on ``mesh`` cannot hold the DTensor ``x``; empty if it can."""
    found = form(x)
    names = [name for name, _ in found.axes]
    if own := [name for name in names if name in mesh.axes]:
        return f"a {found}, but the mesh itself has the axis {own[0]!r}; pass its full_tensor()"
    if odd := [text for text in found.placements if text != "R" and not text.startswith("S(")]:
        return f"a {found}; a parameter is Shard or Replicate, not {odd[0]}"
    try:
        known = mesh.sibling(*names).device_mesh == x.device_mesh
    except KeyError as error:
        return f"a {found}; {error.args[0]}"
    return "" if known else f"a {found}, on other ranks than the device mesh that {mesh} is a slice of"


def misplaced(slots: Iterable[Slot], meshes: Meshes) -> list[str]:
    """The slots of DTensors whose ranks, or whose part on this rank, differ from the layout."""
    problems = []
    for slot in slots:
        assert slot.dtensor is not None
        here = meshes[slot.dtensor.axes]
        part, _ = slot.dtensor.part_at(here.coordinate)
        if (tuple(here.axes.items()), slot.shape) != (slot.dtensor.axes, part):
            problems.append(f"{slot.name!r}: {slot.shape} of a {slot.dtensor}; here {part} over {axes_text(here.axes)}")
    return problems
