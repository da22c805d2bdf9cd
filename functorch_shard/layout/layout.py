"""Which rank holds which element of which parameter: integers, without values and process groups.

Note [Layout]: a *unit* is what is gathered together. Inside a unit, parameters of one dtype, one label and one
trainability are stored row-major, one after the other, in one flat *buffer*; each has its *slot* there. A buffer is
padded to a multiple of its number of shards S, and rank r of the shard axis owns ``[r * n, (r + 1) * n)`` with
``n = numel / S``: its *shard*. The intervals are those of FSDP1's ``FlatParamHandle``
(torch/distributed/fsdp/_flat_param.py); unlike there, padding is always zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..collectives.rules import Schedule
from ..containers import Static
from ..errors import axes_text, reject, table
from ..mesh.mesh import Axis, Mesh
from .buffers import Buffer, Reduction, Slice, Slot, Unit, dtype_name
from .precision import MixedPrecision, buffer_dtypes, divide_factors


@dataclass(frozen=True, repr=False)
class Layout(Static):
    """All units of a model for given axis sizes: the static part of every ``Sharded`` and ``Full``.

    Made by :func:`plan`. Frozen and hashable; two layouts are equal if every parameter has the same place and options
    in both, on any mesh. ``print(layout)`` shows a table. ``axes`` are the mesh's names and sizes; an axis that the
    mesh does not have, for example ``replicate_axis``, has size 1. Several shard axes are one name, ``"dp,cp"``.
    ``aliases`` maps further names of tied parameters to the first. ``virtual_ranks``: of a program with the same bits
    on any number of ranks, 0 for others.
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
    virtual_ranks: int = 0

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
    def _hash(self) -> int:
        return hash((self.units, self.axes, self.shard_axis, self.replicate_axis, self.reduction, self.aliases))

    def __hash__(self) -> int:
        return self._hash

    def axis_size(self, name: str) -> int:
        """The number of ranks of an axis, or of several that are joined, ``"dp,cp"``."""
        return prod(dict(self.axes).get(each, 1) for each in name.split(","))

    @cached_property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that buffers are sharded over, the outermost first."""
        return tuple(self.shard_axis.split(","))

    @cached_property
    def num_shards(self) -> int:
        return self.axis_size(self.shard_axis)

    @cached_property
    def num_ranks(self) -> int:
        """Ranks that a gradient is averaged over: shards times replicas."""
        return self.num_shards * self.axis_size(self.replicate_axis)

    @cached_property
    def copies_are_equal(self) -> bool:
        """Whether ranks with the same shard have the same bits: not without a mean, nor as rows of one batch."""
        return self.num_ranks == self.mesh.size and self.mesh.kind != "batched"  # there kernels round the end otherwise

    @cached_property
    def tensor_meshes(self) -> Mapping[tuple[tuple[str, int], ...], Mesh]:
        """The meshes that the DTensors of this layout are distributed over, by names and sizes of their axes."""
        every = {slot.dtensor.axes for slot in self.slots.values() if slot.dtensor}
        return {axes: self.mesh.sibling(*dict(axes)) for axes in every}

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What was computed from this layout once, for the modules of this package."""
        return {}

    @cached_property
    def schedules(self) -> Mapping[tuple[str, torch.dtype | None], Schedule]:
        """How each buffer is gathered and its gradient reduced, Note [Schedule], each made on first use.

        By its key, and the dtype that one call gathers in or that gradients come in; ``None``: as its unit's policy.
        """
        return _Schedules(self)

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
        cut = [slot for slot in self.slots.values() if slot.dtensor]
        if cut and mesh.device_mesh is not None:
            from ..tensor_parallel.forms import misplaced

            problems = misplaced(cut, layout.tensor_meshes)
            reject("Layout.on", problems, "Each rank needs the layout that was planned at its coordinate.")
        return layout

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
        rows = list[list[Any]]()
        for b in self.buffers.values():
            sizes = [b.parameter_numel, b.numel - b.parameter_numel, b.shard_numel, b.shard_numel * b.dtype.itemsize]
            rows.append([b.key, dtype_name(b.dtype), len(b.slots), *sizes])
        total = ["total", "", *(sum(row[i] for row in rows) for i in range(2, len(header)))]
        spacing = f"slots aligned to {self.align_bytes} bytes" if self.align_bytes else "slots packed"
        over = f"{self.virtual_ranks} virtual ranks" if self.virtual_ranks else "ranks"
        note = f"{axes_text(dict(self.axes))}; gradients: {self.reduction} over {over}; {spacing}"
        cut = Counter(slot.dtensor.axes for slot in self.slots.values() if slot.dtensor)
        cuts = [f"DTensors: the local parts of {n} parameters over {axes_text(dict(axes))}" for axes, n in cut.items()]
        return "\n".join([table([*rows, total], header, left=2), note, *cuts, *_ties(self)])


class _Schedules(dict[tuple[str, "torch.dtype | None"], Schedule]):
    """The schedules of a layout, each made on first use."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._unit_of = {buffer.key: unit for unit in layout.units for buffer in unit.buffers}

    def __missing__(self, which: tuple[str, torch.dtype | None]) -> Schedule:
        (key, dtype), layout = which, self._layout
        buffer = layout.buffers[key]
        dtypes = buffer_dtypes(buffer.dtype, self._unit_of[key].precision, dtype)
        summed = torch.float32 if layout.virtual_ranks else dtypes[1]  # whose sum is not divided before by any number
        divisors = divide_factors(layout.num_ranks, summed) if layout.reduction == "mean" else (1, 1)
        sharded = buffer.num_shards > 1
        others = [layout.replicate_axis, *([] if sharded else layout.shard_axes)]
        copies = tuple(layout.mesh[axis].of(key) for axis in others if layout.axis_size(axis) > 1)
        axis = shard_axis(layout).of(key) if sharded else None
        self[which] = made = Schedule(buffer.dtype, *dtypes, axis, copies, *divisors)
        return made


def as_held(layout: Layout, shards: Mapping[str, Tensor]) -> Layout:
    """The places of ``shards``, by the keys of their buffers, in the dtypes that they have; no mixed precision."""

    def held(b: Buffer) -> Buffer:
        return replace(b, slots=tuple(replace(slot, dtype=shards[b.key].dtype) for slot in b.slots))

    layout = select_buffers(layout, {key: key in shards for key in layout.buffers})
    units = (replace(u, buffers=tuple(map(held, u.buffers)), precision=MixedPrecision()) for u in layout.units)
    return replace(layout, units=tuple(units))


def select_buffers(layout: Layout, keep: Mapping[str, bool]) -> Layout:
    """The layout of the buffers whose key ``keep`` maps to true, unchanged otherwise."""
    units = [replace(unit, buffers=tuple(b for b in unit.buffers if keep[b.key])) for unit in layout.units]
    aliases = tuple((alias, name) for alias, name in layout.aliases if keep[layout.key_of[name]])
    return replace(layout, units=tuple(unit for unit in units if unit.buffers), aliases=aliases)


def merged(layout: Layout, others: Sequence[Layout]) -> Layout:
    """The layout of ``layout`` and ``others``, the inverse of :func:`select_buffers`; the parts are disjoint.

    Cached: every gather of the same parts uses the same object, with what was derived from it.
    """
    if (parts := tuple(others)) in layout.derived:
        return layout.derived[parts]
    layouts = [layout, *parts]
    alike = {replace(each, units=(), aliases=()) for each in layouts}
    precisions = {(unit.name, unit.precision) for each in layouts for unit in each.units}
    if len(alike) > 1 or len(precisions) > len({name for name, _ in precisions}):
        raise ValueError(
            "gather: the trees were planned for other ranks or with other options. Pass parts of one tree."
        )
    counts = Counter(x for layout in layouts for x in (*layout.slots, *map("buffer {}".format, layout.buffers)))
    problems = [f"{name!r}: in {count} trees" for name, count in counts.items() if count > 1]
    reject("gather", problems, "Pass each part of one partition() once; plan models together, or with other units.")
    units: dict[str, Unit] = {}
    for unit in (unit for layout in layouts for unit in layout.units):
        buffers = (*units[unit.name].buffers, *unit.buffers) if unit.name in units else unit.buffers
        units[unit.name] = replace(unit, buffers=tuple(sorted(buffers, key=lambda buffer: buffer.slots[0].index)))
    aliases = tuple(sorted({pair for layout in layouts for pair in layout.aliases}))
    in_order = sorted(units.values(), key=lambda unit: unit.buffers[0].slots[0].index)
    made = layout.derived[parts] = replace(layout, units=tuple(in_order), aliases=aliases)
    return made


_OPTIONS = "axes", "shard_axis", "replicate_axis", "reduction", "align_bytes", "reshard_after_forward", "virtual_ranks"


def _ties(layout: Layout) -> list[str]:
    return [f"tied: {alias} = {name}" for alias, name in layout.aliases]


def lines_of(layout: Layout) -> Iterator[str]:
    """The layout as text, for comparison: the options, every parameter, every buffer, every tie."""
    yield from (f"{name}: {getattr(layout, name)!r}" for name in _OPTIONS)
    yield from places_of(layout)
    yield from (f"precision of unit {unit.name!r}: {unit.precision!r}" for unit in layout.units)
    yield from _ties(layout)


def places_of(layout: Layout) -> Iterator[str]:
    """The place of every element as text: the meaning of the numbers in a shard."""
    for slot in layout.slots.values():  # first, as the size of a buffer depends on all of its parameters
        buffer = layout.buffers[layout.key_of[slot.name]]
        kind = f"shape {slot.shape}, {slot.dtype}, {'trainable' if buffer.trainable else 'frozen'}"
        kind += f", local part of a {slot.dtensor}" if slot.dtensor else ""
        yield f"{slot.name!r}: {kind}, at {slot.offset} of buffer {buffer.key!r}"
    yield "no more parameters"
    for buffer in layout.buffers.values():
        yield f"buffer {buffer.key!r}: {buffer.num_shards} shards of {buffer.shard_numel} elements"


def rank_dims(layout: Layout) -> tuple[int, ...]:
    """The leading dims that each leaf has here: one per axis outside ``spmd`` on simulated ranks, otherwise none."""
    return () if layout.mesh.in_spmd else tuple(dict(layout.axes).values())


def shards_of_ranks(layout: Layout) -> Tensor:
    """The position on the shard axis of every rank, in rank dims."""
    sizes = [size if name in layout.shard_axes else 1 for name, size in layout.axes]
    return torch.arange(layout.num_shards, device="cpu").view(sizes).expand(*dict(layout.axes).values())


def holders_of(buffer: Buffer, layout: Layout) -> list[list[int]]:
    """The ranks that hold each shard of ``buffer``, in row-major order of the axes: one, or as many as have copies."""
    if (holders_of, buffer.num_shards) not in layout.derived:
        ranks: list[list[int]] = [[] for _ in range(buffer.num_shards)]
        for rank, shard in enumerate(shards_of_ranks(layout).flatten().tolist()):
            ranks[shard if buffer.num_shards > 1 else 0].append(rank)
        layout.derived[holders_of, buffer.num_shards] = ranks
    return layout.derived[holders_of, buffer.num_shards]


def shard_axis(layout: Layout) -> Axis:
    """The axis of the mesh that buffers are sharded over."""
    if shard_axis not in layout.derived:
        layout.derived[shard_axis] = layout.mesh[layout.shard_axis]
    return layout.derived[shard_axis]


def shard_index(buffer: Buffer, layout: Layout) -> Tensor | int:
    """Which shard of ``buffer`` this rank holds: an int on real ranks, a batched tensor on simulated ones."""
    return shard_axis(layout).backend.index() if buffer.num_shards > 1 else 0
