"""A layout as SVG: a strip for each buffer, cut at the shards, in which each parameter has its color.

The strips of all buffers are equally wide, so a rank has the same place in each of them. Buffers that are alike are
drawn once: Note [Alike] in text_table.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..layout.layout import Layout
from . import svg
from .text_table import Alike, alike, notes, span

_LEFT, _RIGHT, _TOP, _ROW, _STRIP = 16, 16, 64, 58, 26  # margins, and the heights of a row and of its strip
_DRAWN = 128  # shards, up to which the edges of each are drawn


def drawing(layout: Layout, width: int = 960) -> str:
    """Return the picture as the text of an SVG file, ``width`` pixels wide."""
    inner, kinds = width - _LEFT - _RIGHT, alike(layout)
    body = [svg.text(_LEFT, 22, svg.fitting(repr(layout), inner)), *_ranks(layout, inner)]
    for i, kind in enumerate(kinds):
        body += [svg.text(_LEFT, _TOP + 13 + i * _ROW, svg.fitting(kind.title, inner))]
        body += _strip(kind, _TOP + 20 + i * _ROW, inner)
    end, lines = _TOP + len(kinds) * _ROW + 18, notes(layout)
    if any(b.numel > b.parameter_numel for b in layout.buffers.values()):
        lines.append("gray: padding, always zero")
    if layout.num_shards > _DRAWN:
        lines.append(f"edges between {layout.num_shards:,} shards are not drawn")
    body += [svg.text(_LEFT, end + 16 * i, svg.fitting(line, inner), "fs-faint") for i, line in enumerate(lines)]
    return svg.document(width, end + 16 * len(lines), repr(layout), body)


def _strip(kind: Alike, y: float, width: float) -> Iterator[str]:
    b = kind.buffer
    at = lambda element: _LEFT + width * element / max(b.numel, 1)  # noqa: E731
    tip = f"padding: {b.numel - b.parameter_numel:,} elements, always zero"
    yield svg.rectangle(_LEFT, y, width, _STRIP, "fs-rest", tip)
    for i, slot in enumerate(b.slots):
        left, right, on = at(slot.offset), at(slot.end), span(b, slot)
        where = f"on rank {on}" if on.isdigit() else f"on ranks {on}" if on else "on no rank"
        tip = f"{slot.name} {slot.shape}: {slot.numel:,} elements, {where}"
        yield svg.rectangle(left, y, right - left, _STRIP, f"fs-hue{i % svg.HUES}", tip)
        if name := svg.fitting(kind.short(slot), right - left - 6):
            yield svg.text((left + right) / 2, y + 17, name, anchor="middle")
    if b.num_shards <= _DRAWN:
        edges = (at(rank * b.shard_numel) for rank in range(b.num_shards + 1))
        yield from (svg.line(x, y - 3, x, y + _STRIP + 3) for x in edges)


def _ranks(layout: Layout, width: float) -> Iterator[str]:
    """Yield the number of a rank above its column, or of every so many ranks."""
    number = layout.num_shards
    each = width / number
    every = next(n for n in (1, 2, 4, 8, *(16 << i for i in range(64))) if n * each >= 30)
    for rank in range(0, number, every):
        word = f"rank {rank}" if each * every >= 70 else str(rank)
        yield svg.text(_LEFT + (rank + 0.5) * each, 50, word, "fs-faint", "middle")
