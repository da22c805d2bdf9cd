"""A layout as SVG: a strip for each buffer, cut at the shards, in which each parameter has its color.

The strips of all buffers are equally wide, so a rank has the same place in each of them. Buffers that are alike are
drawn once: Note [Alike] in picture.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .. import svg
from .buffers import Buffer, Slot
from .layout import Layout
from .picture import Alike, alike, copies, span, ties

_LEFT, _RIGHT, _TOP, _ROW, _STRIP = 16, 16, 64, 58, 26  # margins, and the heights of a row and of its strip
_DRAWN, _REPEATED = 128, 16  # shards, up to which the edges of each are drawn, and what each rank has whole


@dataclass(frozen=True)
class _Strip:
    """One buffer and its place in the picture; what each rank has whole is drawn for each of few ranks."""

    kind: Alike
    x: float
    y: float
    width: float

    @property
    def buffer(self) -> Buffer:
        return self.kind.buffer

    def at(self, element: int) -> float:
        return self.x + self.width * element / max(self.buffer.numel, 1)

    def body(self) -> Iterator[str]:
        b = self.buffer
        tip = f"padding: {b.numel - b.parameter_numel:,} elements, always zero"
        yield svg.rectangle(self.x, self.y, self.width, _STRIP, "fs-rest", tip)
        for i, slot in enumerate(b.slots):
            yield from self._slot(i, slot)
        if b.num_shards <= _DRAWN:
            edges = (self.at(r * b.shard_numel) for r in range(b.num_shards + 1))
            yield from (svg.line(x, self.y - 3, x, self.y + _STRIP + 3) for x in edges)

    def _slot(self, index: int, slot: Slot) -> Iterator[str]:
        x, width = self.at(slot.offset), self.at(slot.end) - self.at(slot.offset)
        tip = f"{slot.name} {slot.shape}: {slot.numel:,} elements, {_where(span(self.buffer, slot))}"
        yield svg.rectangle(x, self.y, width, _STRIP, f"fs-hue{index % svg.HUES}", tip)
        name = self.label(slot)
        if name:
            yield svg.text(self._middle(slot, name), self.y + 17, name, anchor="middle")

    def _middle(self, slot: Slot, name: str) -> float:
        """Of the widest part between two edges if the name fits there, and otherwise of the whole."""
        each = self.buffer.shard_numel
        edges = [slot.offset, *range((slot.offset // each + 1) * each, slot.end, each), slot.end]
        start, end = max(pairwise(map(self.at, edges)), key=lambda part: round(part[1] - part[0], 6))
        fits = end - start >= svg.CHARACTER * len(name)
        return (start + end) / 2 if fits else (self.at(slot.offset) + self.at(slot.end)) / 2

    def label(self, slot: Slot) -> str:
        """As much of the parameter's name as its rectangle has place for."""
        return svg.fitting(self.kind.short(slot), self.width * slot.numel / max(self.buffer.numel, 1) - 6)


def _where(on: str) -> str:
    return f"on rank {on}" if on.isdigit() else f"on ranks {on}" if on else "on no rank"


def _strips(kind: Alike, num_shards: int, y: float, width: float) -> list[_Strip]:
    """A buffer once over all ranks, or whole in the column of each, if these are wide enough."""
    if kind.buffer.num_shards == num_shards or num_shards > _REPEATED:
        return [_Strip(kind, _LEFT, y, width)]
    each = width / num_shards
    return [_Strip(kind, _LEFT + i * each, y, each - 4) for i in range(num_shards)]


def drawing(layout: Layout, width: int = 960) -> str:
    """The picture as the text of an SVG file, ``width`` pixels wide."""
    inner, kinds = width - _LEFT - _RIGHT, alike(layout)
    strips = [_strips(kind, layout.num_shards, _TOP + 20 + i * _ROW, inner) for i, kind in enumerate(kinds)]
    notes = [*copies(layout), *_notes(layout, [row[0] for row in strips])]
    body = [svg.text(_LEFT, 22, svg.fitting(repr(layout), inner)), *_ranks(layout, inner)]
    for i, (kind, row) in enumerate(zip(kinds, strips, strict=True)):
        title = "; ".join([kind.title, *([kind.like_it] if kind.others else [])])
        body += [svg.text(_LEFT, _TOP + 13 + i * _ROW, svg.fitting(title, inner))]
        body += [part for strip in row for part in strip.body()]
    end = _TOP + len(kinds) * _ROW + 18
    body += [svg.text(_LEFT, end + 16 * i, svg.fitting(note, inner), "fs-faint") for i, note in enumerate(notes)]
    return svg.document(width, end + 16 * len(notes), repr(layout), body)


def _ranks(layout: Layout, width: float) -> Iterator[str]:
    """The number of a rank above its column, or of every so many ranks."""
    number = layout.num_shards
    each = width / number
    every = next(n for n in (1, 2, 4, 8, *(16 << i for i in range(64))) if n * each >= 30)
    for rank in range(0, number, every):
        word = f"rank {rank}" if each * every >= 70 else str(rank)
        yield svg.text(_LEFT + (rank + 0.5) * each, 50, word, "fs-faint", "middle")


def _notes(layout: Layout, strips: Sequence[_Strip]) -> list[str]:
    padded = any(b.numel > b.parameter_numel for b in layout.buffers.values())
    narrow = sum(not strip.label(slot) for strip in strips for slot in strip.buffer.slots)
    notes = ["gray: padding, always zero"] if padded else []
    if narrow:
        notes.append(f"{narrow} parameters are too narrow for their names, which are shown under the pointer")
    if layout.num_shards > _DRAWN:
        notes.append(f"edges between {layout.num_shards:,} shards are not drawn")
    return [*notes, *ties(layout)]
