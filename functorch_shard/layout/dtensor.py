"""Parameters that are DTensors: the form of one, this rank's local part, and whether a layout can hold it.

``tensor_parallel`` makes DTensors of what is gathered. ``torch.distributed.tensor`` takes half a second to import, and
is only imported after the program has made a DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import axes_text
from ..mesh.mesh import Mesh


@dataclass(frozen=True, slots=True)
class DTensorForm:
    """The shape of a DTensor and its placements along the axes of its device mesh.

    ``placements`` has one entry for each of ``axes``: ``"S(dim)"`` for sharded along ``dim``, ``"R"`` for replicated.
    """

    shape: tuple[int, ...]
    placements: tuple[str, ...]
    axes: tuple[tuple[str, int], ...]

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def cut_over(self) -> tuple[str, ...]:
        """The axes whose ranks hold different elements, which a norm sums over; the ranks of others hold copies."""
        return tuple(name for name, text in zip(self.axis_names, self.placements, strict=True) if text != "R")

    def local_shape(self, place: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of rank ``place[i]`` of each axis, chunked like ``torch.chunk``, axis after axis."""
        return self._local_part(place)[0]

    def local_start(self, place: Sequence[int]) -> tuple[int, ...]:
        """The start of that part in each dim of the whole."""
        return self._local_part(place)[1]

    def _local_part(self, place: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape, start = list(self.shape), [0] * len(self.shape)
        for (_, size), text, index in zip(self.axes, self.placements, place, strict=True):
            if text != "R":
                dim = int(text[2:-1])
                chunk = -(-shape[dim] // size)
                skipped = min(index * chunk, shape[dim])
                start[dim] += skipped
                shape[dim] = min(chunk, shape[dim] - skipped)
        return tuple(shape), tuple(start)

    def __str__(self) -> str:
        return f"DTensor of shape {self.shape}, {' '.join(self.placements)} over {axes_text(dict(self.axes))}"


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


def cut_out(x: Tensor, form: DTensorForm | None, tensor_meshes: Mapping[Any, Mesh]) -> Tensor:
    """This rank's part of the whole value of a DTensor; anything else unchanged."""
    if form is None:
        return x
    place = tensor_meshes[form.axes].coordinate
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


def _text(placement: Any) -> str:
    from torch.distributed.tensor import Replicate, Shard

    known = f"S({placement.dim})" if type(placement) is Shard else "R"
    return known if type(placement) in (Replicate, Shard) else repr(placement)
