"""A layout as a table of characters: a row for each parameter, a column for each rank of the shard axis.

Note [Alike]: buffers that have the same slots, as those of transformer blocks, are shown once. Everything else that is
left out is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import shown
from ..layout.buffers import Buffer, Slot, dtype_name
from ..layout.layout import Layout, shards_of_ranks

_ROWS = 24  # parameters of a buffer that have rows of their own
_GAP = 2


@dataclass(frozen=True)
class Alike:
    """Buffers with the same slots: the first one, and the keys of the others."""

    buffer: Buffer
    unit: str
    others: tuple[str, ...]

    def short(self, slot: Slot) -> str:
        """Return the name of a parameter without that of its unit."""
        return shown(slot.name.removeprefix(f"{self.unit}."))

    @property
    def title(self) -> str:
        b = self.buffer
        where = f"{b.num_shards} shards of" if b.num_shards > 1 else "whole on each rank:"
        frozen = "" if b.trainable else ", frozen"
        title = f"{shown(b.key)}: {where} {b.shard_numel:,} {dtype_name(b.dtype)}{frozen}"
        names = [shown(key) for key in self.others]
        some = names if len(names) < 4 else [*names[:2], "...", names[-1]]
        return f"{title}; also {len(names)} like it: {', '.join(some)}" if names else title


def alike(layout: Layout) -> list[Alike]:
    """Return the kinds of buffers, in the layout's order; Note [Alike]."""
    found: dict[object, list[tuple[str, Buffer]]] = {}
    for name, buffer in ((unit.name, buffer) for unit in layout.units for buffer in unit.buffers):
        slots = tuple((s.name.removeprefix(f"{name}."), s.shape, s.offset, s.dtensor) for s in buffer.slots)
        kind = slots, buffer.dtype, buffer.label, buffer.trainable, buffer.num_shards, buffer.numel
        found.setdefault(kind, []).append((name, buffer))
    return [Alike(all_[0][1], all_[0][0], tuple(b.key for _, b in all_[1:])) for all_ in found.values()]


def notes(layout: Layout) -> list[str]:
    """Return a line about the ranks that hold the same, and one about the names of one parameter."""
    ties, number = [f"{alias} = {name}" for alias, name in layout.aliases], layout.num_ranks // layout.num_shards
    few = ties if len(ties) < 4 else [*ties[:3], f"and {len(ties) - 3} more"]
    tied = [f"tied: {', '.join(few)}"] if ties else []
    if number == 1:
        return tied
    on, shards = shards_of_ranks(layout).flatten().tolist(), range(min(layout.num_shards, 3))
    ranks = [[str(rank) for rank, shard in enumerate(on) if shard == s] for s in shards]
    some = [f"{{{', '.join(r if len(r) <= 4 else [*r[:2], '...', r[-1]])}}}" for r in ranks]
    more = ", ..." if layout.num_shards > 3 else ""
    return [f"{number} replicas: column r is on {number} ranks of the mesh, {', '.join(some)}{more}", *tied]


def table(layout: Layout, width: int) -> str:
    """Return the picture for a terminal of ``width`` columns."""
    kinds = alike(layout)
    page, lines = _page(kinds, layout.num_shards, width), [repr(layout)]
    lines += ["", page.row("rank", "", str)]
    for kind in kinds:
        lines += ["", kind.title, *(page.row(*row) for row in _rows(kind, page))]
    left = []
    if None in page.columns:
        left.append(f"left out: ranks {page.columns.index(None)} to {layout.num_shards - 2}, between the columns")
    return "\n".join([*lines, "", *notes(layout), *left]).rstrip()


@dataclass(frozen=True)
class _Page:
    """Widths of the columns of characters, and the ranks that have a column; None: those that are left out."""

    name: int
    middle: int
    cell: int
    columns: Sequence[int | None]

    def row(self, name: str, middle: str, of: Callable[[int], str]) -> str:
        name = name if len(name) <= self.name else f"..{name[2 - self.name :]}"
        front = f"  {name:<{self.name}}  {middle:<{self.middle}}"
        cells = [".." if rank is None else of(rank) for rank in self.columns]
        return "".join([front, *(f"{cell:>{self.cell + _GAP}}" for cell in cells)]).rstrip()


def _page(kinds: Sequence[Alike], ranks: int, width: int) -> _Page:
    """Return a column for each rank, or for as many as fit, with those that hold a parameter in place of its shape."""
    slots = [(kind, slot) for kind in kinds for slot in kind.buffer.slots[:_ROWS]]
    name = min(max([len(kind.short(slot)) for kind, slot in slots] + [len("padding")]), max(width // 3, 12))
    shapes, ranges = max([len(_shape(slot)) for _, slot in slots] + [0]), 2 * len(str(ranks - 1)) + 1
    cell = max(5, len(str(ranks - 1)))
    places = lambda middle: (width - 2 * _GAP - name - middle) // (cell + _GAP)  # noqa: E731
    if ranks <= places(shapes):
        return _Page(name, shapes, cell, range(ranks))
    middle = max(ranges, len("all"))
    first = max(min(places(middle), ranks) - 2, 1)
    return _Page(name, middle, cell, [*range(first), None, ranks - 1] if first < ranks - 1 else range(ranks))


def _shape(slot: Slot) -> str:
    return f"{slot.shape}{' of a DTensor' if slot.dtensor else ''}"


def _rows(kind: Alike, page: _Page) -> Iterator[tuple[str, str, Callable[[int], str]]]:
    """Yield names, shapes or ranks, and what a rank has: of parameters, of those without a row, and of padding."""
    b = kind.buffer
    held = lambda slots, rank: sum(b.part(slot, rank).numel for slot in slots)  # noqa: E731
    listed, rest = (b.slots, ()) if len(b.slots) <= _ROWS else (b.slots[: _ROWS - 1], b.slots[_ROWS - 1 :])
    for slot in listed:
        middle = span(b, slot) if None in page.columns else _shape(slot)
        yield kind.short(slot), middle, lambda r, s=slot: compact(held([s], r))
    if rest:
        yield f"{len(rest)} more", "", lambda r: compact(held(rest, r))
    if b.numel > b.parameter_numel:
        yield "padding", "", lambda r: compact(b.shard_numel - held(b.slots, r))


def span(buffer: Buffer, slot: Slot) -> str:
    """Return the ranks of the shard axis that hold a parameter: ``0-95``."""
    if buffer.num_shards == 1 or not slot.numel:
        return "" if not slot.numel else "all"
    first, last = slot.offset // buffer.shard_numel, (slot.end - 1) // buffer.shard_numel
    return str(first) if first == last else f"{first}-{last}"


def compact(number: int) -> str:
    """Return a number of elements in five characters: ``24.8k``; ``.`` is none."""
    if number < 10_000:
        return f"{number:,}" if number else "."
    power = (len(str(number)) - 1) // 3
    scaled = number / 1000**power
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{digits}f}{'kMGTPE'[power - 1]}"
