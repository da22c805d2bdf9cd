"""Layouts of some of the buffers of a layout, and layouts as text, for comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import axes_text, reject
from .buffers import Unit, in_source_order
from .layout import Layout
from .precision import MixedPrecision

_OPTIONS = "axes", "shard_axis", "replicate_axis", "reduction", "align_bytes", "reshard_after_forward"


def as_stored(layout: Layout) -> Layout:
    """The same places, without mixed precision."""
    return replace(layout, units=tuple(replace(unit, precision=MixedPrecision()) for unit in layout.units))


def select_buffers(layout: Layout, keep: Mapping[str, bool]) -> Layout:
    """The layout of the buffers whose key ``keep`` maps to true, unchanged otherwise."""
    units = [replace(unit, buffers=tuple(b for b in unit.buffers if keep[b.key])) for unit in layout.units]
    aliases = tuple((alias, name) for alias, name in layout.aliases if keep[layout.key_of[name]])
    return replace(layout, units=tuple(unit for unit in units if unit.buffers), aliases=aliases)


def layouts_of_units(layout: Layout) -> Iterator[Layout]:
    """A layout for each unit."""
    for unit in layout.units:
        names = [slot.name for buffer in unit.buffers for slot in buffer.slots]
        ties = sorted((alias, name) for name in names for alias in layout.aliases_of.get(name, ()))
        yield replace(layout, units=(unit,), aliases=tuple(ties))


def merged(layout: Layout, others: Sequence[Layout]) -> Layout:
    """The layout of ``layout`` and ``others``, the inverse of :func:`select_buffers`; the parts are disjoint.

    Cached: every gather of the same parts uses the same object, with what was derived from it.
    """
    parts = tuple(others)
    if parts not in layout.derived:
        layout.derived[parts] = _merged([layout, *parts])
    return layout.derived[parts]


def _merged(layouts: Sequence[Layout]) -> Layout:
    _check_parts(*layouts)
    parts: dict[str, Unit] = {}
    for unit in (unit for layout in layouts for unit in layout.units):
        buffers = (*parts[unit.name].buffers, *unit.buffers) if unit.name in parts else unit.buffers
        parts[unit.name] = replace(unit, buffers=in_source_order(buffers))
    aliases = tuple(sorted({pair for layout in layouts for pair in layout.aliases}))
    in_order = sorted(parts.values(), key=lambda unit: unit.buffers[0].slots[0].index)
    return replace(layouts[0], units=tuple(in_order), aliases=aliases)


def _check_parts(*layouts: Layout) -> None:
    said = [
        {name: getattr(layout, name) for name in _OPTIONS}
        | {f"precision of unit {unit.name!r}": unit.precision for unit in layout.units}
        for layout in layouts
    ]
    problems = [
        f"{what}: {said[0][what]!r} in the first tree, {value!r} in another"
        for other in said[1:]
        for what, value in other.items()
        if said[0].get(what, value) != value
    ]
    counts = Counter(name for layout in layouts for name in layout.slots)
    problems += [f"{name!r}: in {count} trees" for name, count in counts.items() if count > 1]
    reject("gather", problems, "Pass each part that partition() made of one tree once.")


def lines_of(layout: Layout) -> Iterator[str]:
    """The layout as text: the options, every parameter, every buffer, every tie."""
    over = f"{layout.reduction} over {layout.shard_axis!r} and {layout.replicate_axis!r}"
    yield f"{axes_text(dict(layout.axes))}, {over}, slots aligned to {layout.align_bytes} bytes"
    yield f"reshard_after_forward={layout.reshard_after_forward}"
    yield from places_of(layout)
    for unit in layout.units:
        yield f"unit {unit.name!r}: {unit.precision}"
    yield from (f"tied: {alias} = {name}" for alias, name in layout.aliases)


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
