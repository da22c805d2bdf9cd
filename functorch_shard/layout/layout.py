"""Which rank holds which element of which parameter: integers only, no tensors and no process groups.

Note [Layout]: a *unit* is what is gathered together. Inside a unit, parameters of one dtype, one label and one
trainability are stored row-major, one after the other, in one flat *buffer*; each has its *slot* there. A buffer is
padded to a multiple of its number of shards S, and rank r of the shard axis owns ``[r * n, (r + 1) * n)`` with
``n = numel / S``: its *shard*. The intervals are those of FSDP1's ``FlatParamHandle``
(torch/distributed/fsdp/_flat_param.py); unlike there, padding is always zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any, cast

import torch

from ..containers import Static
from ..errors import axes_text, reject, table
from ..mesh.mesh import Mesh
from .buffers import OWNERS, Buffer, Reduction, Slice, Slot, Unit, dtype_name
from .precision import MixedPrecision, buffer_dtypes, divide_factors
from .schedule import Schedule, make_schedule


@dataclass(frozen=True, repr=False)
class Layout(Static):
    """All units of a model for given axis sizes: the static part of every ``Sharded`` and ``Full``.

    Made by :func:`plan`. Frozen and hashable; two layouts are equal if every parameter has the same place in both, on
    any mesh. ``print(layout)`` shows a table. ``axes`` are the mesh's names and sizes; an axis that the mesh does not
    have, for example ``replicate_axis``, has size 1. Several shard axes are one name, ``"dp,cp"``. ``aliases`` maps
    further names of tied parameters to the first.
    """

    units: tuple[Unit, ...]
    axes: tuple[tuple[str, int], ...]
    shard_axis: str
    replicate_axis: str
    reduction: Reduction
    align_bytes: int
    aliases: tuple[tuple[str, str], ...]
    mesh: Mesh = field(compare=False)
    reshard_after_forward: bool = True

    @cached_property
    def buffers(self) -> Mapping[str, Buffer]:
        return {buffer.key: buffer for unit in self.units for buffer in unit.buffers}

    @cached_property
    def slots(self) -> Mapping[str, Slot]:
        """Every parameter's slot, by name, in the source's order."""
        slots = sorted((slot for buffer in self.buffers.values() for slot in buffer.slots), key=lambda slot: slot.index)
        return {slot.name: slot for slot in slots}

    @cached_property
    def key_of(self) -> Mapping[str, str]:
        """The key of the buffer that holds each parameter."""
        return {slot.name: buffer.key for buffer in self.buffers.values() for slot in buffer.slots}

    @cached_property
    def aliases_of(self) -> Mapping[str, tuple[str, ...]]:
        """The further names of each tied parameter, by its first name."""
        tied: dict[str, list[str]] = {}
        for alias, name in self.aliases:
            tied.setdefault(name, []).append(alias)
        return {name: tuple(further) for name, further in tied.items()}

    @cached_property
    def _precision_of(self) -> Mapping[str, MixedPrecision]:
        """The policy of each buffer's unit, by the buffer's key."""
        return {buffer.key: unit.precision for unit in self.units for buffer in unit.buffers}

    @cached_property
    def _hash(self) -> int:
        return hash((self.units, self.axes, self.shard_axis, self.replicate_axis, self.reduction, self.aliases))

    def __hash__(self) -> int:
        return self._hash

    def axis_size(self, name: str) -> int:
        """The number of ranks of an axis, or of several that are joined, ``"dp,cp"``."""
        return prod(dict(self.axes).get(each, 1) for each in name.split(","))

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that buffers are sharded over, the outermost first."""
        return tuple(self.shard_axis.split(","))

    @cached_property
    def tensor_meshes(self) -> Mapping[tuple[tuple[str, int], ...], Mesh]:
        """The meshes that the DTensors of this layout are distributed over, by names and sizes of their axes."""
        every = {slot.dtensor.axes for slot in self.slots.values() if slot.dtensor}
        return {axes: self.mesh.sibling(*dict(axes)) for axes in every}

    @property
    def has_owners(self) -> bool:
        """Whether it is of an optimizer's state whose parameters have owners, by which it is sharded."""
        return bool(self.units) and self.units[-1].name == OWNERS

    @property
    def num_shards(self) -> int:
        return self.axis_size(self.shard_axis)

    @property
    def num_ranks(self) -> int:
        """Ranks that a gradient is averaged over: shards times replicas."""
        return self.num_shards * self.axis_size(self.replicate_axis)

    @property
    def replicate_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that shards are replicated over."""
        return tuple(self.replicate_axis.split(","))

    def schedule(self, buffer: Buffer, dtype: torch.dtype | None = None) -> Schedule:
        """How ``buffer`` is gathered and its gradient reduced, made once; Note [Schedule] in schedule.py.

        Args:
            buffer: one of this layout.
            dtype: what one call gathers in, or what gradients come in, instead of its unit's policy.
        """
        key = (buffer.key, dtype)
        if key not in self.derived:
            self.derived[key] = self._schedule(buffer, dtype)
        return self.derived[key]

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What was computed from this layout once, for the modules of this package."""
        return {}

    def _schedule(self, buffer: Buffer, dtype: torch.dtype | None) -> Schedule:
        dtypes = buffer_dtypes(buffer.dtype, self._precision_of[buffer.key], dtype)
        divisors = divide_factors(self.num_ranks, dtypes.reduced) if self.reduction == "mean" else (1, 1)
        sharded = buffer.num_shards > 1
        others = [*self.replicate_axes, *([] if sharded else self.shard_axes)]
        copies = {axis: size for axis in others if (size := self.axis_size(axis)) > 1}
        return make_schedule(buffer.key, dtypes, self.shard_axis if sharded else None, copies, divisors)

    def slices(self, rank: int) -> list[Slice]:
        """The parts of parameters that rank ``rank`` of the shard axis holds: arithmetic, no process group.

        Args:
            rank: position on the shard axis, ``0 <= rank < num_shards``.

        Returns:
            ``(name, offset in the shard, numel, start in the flattened parameter)``, in elements. Offsets count from
            the start of the shard of the parameter's own buffer, ``layout.key_of[name]``.

        Example:
            >>> layout = fs.plan({"w": torch.zeros(3, 3), "b": torch.zeros(3)}, fs.simulated_mesh(2))
            >>> layout.slices(0)
            [Slice(name='w', offset=0, numel=8, start=0)]
            >>> layout.slices(1)
            [Slice(name='w', offset=0, numel=1, start=8), Slice(name='b', offset=4, numel=3, start=0)]
        """
        if not 0 <= rank < self.num_shards:
            raise ValueError(f"slices: got rank {rank}, expected 0 <= rank < {self.num_shards} ({self.shard_axis!r})")
        return [part for buffer in self.buffers.values() for part in buffer.slices(rank)]

    def on(self, mesh: Mesh) -> Layout:
        """The same layout on another mesh of the same sizes, for example for an unpickled tree."""
        if tuple(mesh.axes.items()) != self.axes:
            raise ValueError(
                f"Layout.on: the layout is for {axes_text(dict(self.axes))}, the mesh has {axes_text(mesh.axes)}. "
                "A layout is for fixed sizes: plan a new one on this mesh."
            )
        layout = replace(self, mesh=mesh)
        reject("Layout.on", _misplaced(layout), "Each rank needs the layout that was planned at its coordinate.")
        return layout

    def _ties(self) -> list[str]:
        return [f"tied: {alias} = {name}" for alias, name in self.aliases]

    def __getstate__(self) -> dict[str, Any]:
        # Without cached properties: the hash of a string differs between processes.
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self  # immutable, and its mesh is a handle

    def __repr__(self) -> str:
        numel = sum(slot.numel for slot in self.slots.values())
        counts = f"{len(self.units)} units, {len(self.slots)} parameters, {numel:,} elements"
        return f"Layout({counts}, {axes_text(dict(self.axes))})"

    def __str__(self) -> str:
        header = ("buffer", "dtype", "parameters", "elements", "padding", "shard", "shard bytes")
        rows = [_row(buffer) for buffer in self.buffers.values()]
        total = ["total", "", *(sum(cast(int, row[i]) for row in rows) for i in range(2, len(header)))]
        spacing = f"slots aligned to {self.align_bytes} bytes" if self.align_bytes else "slots packed"
        note = f"{axes_text(dict(self.axes))}; gradients: {self.reduction} over ranks; {spacing}"
        return "\n".join([table([*rows, total], header, left=2), note, *self._dtensors(), *self._ties()])

    def _dtensors(self) -> list[str]:
        parts = Counter(slot.dtensor.axes for slot in self.slots.values() if slot.dtensor)
        return [f"DTensors: the local parts of {n} parameters over {axes_text(dict(a))}" for a, n in parts.items()]


def _row(buffer: Buffer) -> list[object]:
    dtype, elements, shard = dtype_name(buffer.dtype), buffer.parameter_numel, buffer.shard_numel
    sizes = [len(buffer.slots), elements, buffer.numel - elements, shard, shard * buffer.dtype.itemsize]
    return [buffer.key, dtype, *sizes]


def _misplaced(layout: Layout) -> list[str]:
    """DTensors whose ranks, or whose part on this rank, differ from the layout."""
    if layout.mesh.device_mesh is None:  # simulated or unpickled: no ranks to ask
        return []
    problems = []
    for slot, form in ((slot, slot.dtensor) for slot in layout.slots.values() if slot.dtensor):
        sibling = layout.tensor_meshes[form.axes]
        if tuple(sibling.axes.items()) != form.axes:
            problems.append(f"{slot.name!r}: local part of a {form}, but the axes here are {axes_text(sibling.axes)}")
        elif slot.shape != (here := form.local_shape(sibling.coordinate)):
            problems.append(f"{slot.name!r}: shape {slot.shape} of a {form}, but the local part here has {here}")
    return problems
