"""A layout as a table of characters: a row for each parameter, a column for each rank of the shard axis.

Note [Alike]: buffers that have the same slots, as those of transformer blocks, are shown once. Everything else that is
left out is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import shown
from .buffers import Buffer, Slot, dtype_name
from .layout import Layout
from .ranks import shards_of_ranks

_ROWS, _BUFFERS = 24, 40  # parameters of a buffer, and kinds of buffers, that have rows of their own
GAP = 2


@dataclass(frozen=True)
class Alike:
    """Buffers with the same slots: the first one, and the keys of the others."""

    buffer: Buffer
    unit: str
    others: tuple[str, ...]

    def short(self, slot: Slot) -> str:
        """The name of a parameter without that of its unit."""
        return shown(slot.name.removeprefix(f"{self.unit}."))

    @property
    def title(self) -> str:
        b = self.buffer
        frozen = "" if b.trainable else ", frozen"
        shards = (
            f"{b.num_shards} shards of {b.shard_numel:,}" if b.num_shards > 1 else f"whole on each rank: {b.numel:,}"
        )
        return f"{shown(b.key)}: {shards} {dtype_name(b.dtype)}{frozen}"

    @property
    def like_it(self) -> str:
        """The others, as text."""
        names = [shown(key) for key in self.others]
        return f"also {len(names)} like it: {', '.join(names if len(names) < 4 else [*names[:2], '...', names[-1]])}"


def alike(layout: Layout) -> list[Alike]:
    """The kinds of buffers, in the layout's order; Note [Alike]."""
    found: dict[object, list[tuple[str, Buffer]]] = {}
    for name, buffer in ((unit.name, buffer) for unit in layout.units for buffer in unit.buffers):
        slots = tuple((s.name.removeprefix(f"{name}."), s.shape, s.offset, s.dtensor) for s in buffer.slots)
        kind = slots, buffer.dtype, buffer.label, buffer.trainable, buffer.num_shards, buffer.numel
        found.setdefault(kind, []).append((name, buffer))
    return [Alike(all_[0][1], all_[0][0], tuple(b.key for _, b in all_[1:])) for all_ in found.values()]


def held(buffer: Buffer, slots: Sequence[Slot], rank: int) -> int:
    """How many elements of parameters are on a rank of the shard axis."""
    return sum(buffer.part(slot, rank).numel for slot in slots)


def padding(buffer: Buffer, rank: int) -> int:
    """How many elements of a rank's shard belong to no parameter."""
    return buffer.shard_numel - held(buffer, buffer.slots, rank)


def ranks_with(layout: Layout, number: int) -> list[list[int]]:
    """The ranks of the mesh that have each of the first ``number`` shards: its copies."""
    found: list[list[int]] = [[] for _ in range(number)]
    for rank, shard in enumerate(shards_of_ranks(layout)):
        if shard < number:
            found[shard].append(rank)
    return found


def copies(layout: Layout) -> list[str]:
    """The ranks that hold the same, in a line; nothing where each rank's shard is the only one."""
    number = layout.num_ranks // layout.num_shards
    if number == 1:
        return []
    some = ["{" + _some(ranks) + "}" for ranks in ranks_with(layout, min(layout.num_shards, 3))]
    more = ", ..." if layout.num_shards > 3 else ""
    return [f"{number} replicas: column r is on {number} ranks of the mesh, {', '.join(some)}{more}"]


def _some(ranks: Sequence[int]) -> str:
    few = ranks if len(ranks) <= 4 else [*ranks[:2], "...", ranks[-1]]
    return ", ".join(map(str, few))


def text(layout: Layout, width: int) -> str:
    """The picture for a terminal of ``width`` columns."""
    kinds = alike(layout)
    page = _page(kinds, layout.num_shards, width)
    lines = [repr(layout), "", page.row("rank", "", str)]
    for kind in kinds[:_BUFFERS]:
        lines += ["", *_titles(kind, width), *(page.row(*row) for row in _rows(kind, page))]
    return "\n".join([*lines, "", *copies(layout), *ties(layout), *_left_out(kinds, page)]).rstrip()


@dataclass(frozen=True)
class _Page:
    """Widths of the columns of characters, how numbers are written, and the ranks that have a column."""

    name: int
    middle: int
    cell: int
    ranks: int
    form: Callable[[int], str]
    columns: Sequence[int | None]

    def row(self, name: str, middle: str, of: Callable[[int], str]) -> str:
        name = name if len(name) <= self.name else f"..{name[2 - self.name :]}"
        front = f"  {name:<{self.name}}" + (f"  {middle:<{self.middle}}" if self.middle else "")
        cells = [".." if rank is None else of(rank) for rank in self.columns]
        return "".join([front, *(f"{cell:>{self.cell + GAP}}" for cell in cells)]).rstrip()


def _page(kinds: Sequence[Alike], ranks: int, width: int) -> _Page:
    """The most that fits: shapes and exact numbers, short numbers, no shapes, or ranks that are left out."""
    slots = [(kind, slot) for kind in kinds for slot in kind.buffer.slots[:_ROWS]]
    name = min(max([len(kind.short(slot)) for kind, slot in slots] + [len("padding")]), max(width // 3, 12))
    shape = max([len(_shape(slot)) for _, slot in slots] + [0])
    digits = len(str(ranks - 1))
    long = max([len(exact(kind.buffer.shard_numel)) for kind in kinds] + [digits])
    short = max(5, digits)
    for middle, cell, form in ((shape, long, exact), (shape, short, compact), (0, long, exact), (0, short, compact)):
        if ranks <= _places(width, name, middle, cell):
            return _Page(name, middle, cell, ranks, form, range(ranks))
    wide = max(2 * digits + 1, len("all"))
    return _Page(name, wide, short, ranks, compact, _columns(ranks, _places(width, name, wide, short)))


def _places(width: int, name: int, middle: int, cell: int) -> int:
    """How many ranks have a column."""
    return (width - GAP - name - (middle + GAP if middle else 0)) // (cell + GAP)


def _columns(ranks: int, places: int) -> list[int | None]:
    """The ranks that have a column: all, or the first ones and the last with a gap between them."""
    if ranks <= places:
        return [*range(ranks)]
    return [*range(max(places - 2, 1)), None, ranks - 1]


def _titles(kind: Alike, width: int) -> list[str]:
    if not kind.others:
        return [kind.title]
    both = f"{kind.title}; {kind.like_it}"
    return [both] if len(both) <= width else [kind.title, f"  {kind.like_it}"]


def _shape(slot: Slot) -> str:
    return f"{slot.shape}{' of a DTensor' if slot.dtensor else ''}"


def _rows(kind: Alike, page: _Page) -> Iterator[tuple[str, str, Callable[[int], str]]]:
    """Names, shapes or ranks, and what a rank has: of parameters, of those without a row, and of padding."""
    b = kind.buffer
    listed, rest = (b.slots, ()) if len(b.slots) <= _ROWS else (b.slots[: _ROWS - 1], b.slots[_ROWS - 1 :])
    for slot in listed:
        middle = span(b, slot) if None in page.columns else _shape(slot)
        yield kind.short(slot), middle if page.middle else "", lambda r, s=slot: page.form(held(b, [s], r))
    if rest:
        yield f"{len(rest)} more", "", lambda r: page.form(held(b, rest, r))
    if b.numel > b.parameter_numel:
        yield "padding", "", lambda r: page.form(padding(b, r))


def span(buffer: Buffer, slot: Slot) -> str:
    """The ranks of the shard axis that hold a parameter: ``0-95``."""
    if buffer.num_shards == 1 or not slot.numel:
        return "" if not slot.numel else "all"
    first, last = slot.offset // buffer.shard_numel, (slot.end - 1) // buffer.shard_numel
    return str(first) if first == last else f"{first}-{last}"


def ties(layout: Layout) -> list[str]:
    """Names of one parameter, in a line."""
    ties = [f"{alias} = {name}" for alias, name in layout.aliases]
    return [f"tied: {', '.join(ties if len(ties) < 4 else [*ties[:3], f'and {len(ties) - 3} more'])}"] if ties else []


def _left_out(kinds: Sequence[Alike], page: _Page) -> list[str]:
    lines = []
    if None in page.columns:
        lines.append(f"left out: ranks {page.columns.index(None)} to {page.ranks - 2}, between the columns")
    if len(kinds) > _BUFFERS:
        lines.append(f"left out: {len(kinds) - _BUFFERS} more kinds of buffers")
    return lines


def exact(number: int) -> str:
    """A number of elements; ``.`` is none."""
    return f"{number:,}" if number else "."


def compact(number: int) -> str:
    """A number of elements in five characters: ``24.8k``."""
    if number < 10_000:
        return exact(number)
    power = (len(str(number)) - 1) // 3
    scaled = number / 1000**power
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{digits}f}{'kMGTPE'[power - 1]}"
