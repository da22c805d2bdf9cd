"""A layout as SVG, and SVG as text: rectangles, lines, texts and their colors, on a light or a dark background.

A picture has a strip for each buffer, cut at the shards, in which each parameter has its color. The strips are equally
wide, so a rank has the same place in each of them. Buffers that are alike are drawn once: Note [Alike] in
text_table.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from ..errors import shown
from ..layout.layout import Layout
from .text_table import Alike, alike, notes, span

_LEFT, _RIGHT, _TOP, _ROW, _STRIP = 16, 16, 64, 58, 26  # margins, and the heights of a row and of its strip
_DRAWN = 128  # shards, up to which the edges of each are drawn
HUES = 8
CHARACTER = 6.7  # the width of one at 11 px in a font of fixed width, with a margin
PALETTES = (  # of parameters, light and dark
    ("#9ecae9", "#fdc489", "#a8dba0", "#cdb8e0", "#f4aeb0", "#9bdcd0", "#f2de86", "#d9bf9c"),
    ("#1f5a85", "#8f531d", "#2c6e3a", "#5f4290", "#8f3038", "#1c6b62", "#766213", "#6b4f2e"),
)
COLORS = {  # light and dark
    "back": ("#ffffff", "#16181d"),
    "rest": ("#eceef1", "#2a2e36"),
    "ink": ("#1f2328", "#f2f4f6"),
    "faint": ("#656d76", "#9aa2ad"),
    "edge": ("#24292f", "#c9ced6"),
    "mark": ("#cf222e", "#ff7b72"),
}


def _rules(dark: int) -> str:
    colors = {name: pair[dark] for name, pair in COLORS.items()}
    rules = [f".fs-{name}{{fill:{color}}}" for name, color in colors.items()]
    rules += [f".fs-{name}-line{{stroke:{color}}}" for name, color in colors.items()]
    return "".join([*rules, *(f".fs-hue{i}{{fill:{color}}}" for i, color in enumerate(PALETTES[dark]))])


# Selectors begin with the class of the picture: a notebook puts it into its own page.
_FONT = ".fs-picture text{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
STYLE = f"{_FONT}.fs-picture path,.fs-picture line{{fill:none}}{_rules(0)}"
DARK = f"@media (prefers-color-scheme:dark){{{_rules(1)}}}"


def document(width: int, height: float, title: str, body: Iterable[str]) -> str:
    """Return a whole SVG file, with its colors and a background."""
    size = f'width="{width}" height="{number(height)}" viewBox="0 0 {width} {number(height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="fs-picture" role="img" {size}>'
    lines = [head, f"<title>{quoted(title)}</title>", f"<style>{STYLE}{DARK}</style>"]
    return "\n".join([*lines, rectangle(0, 0, width, height, "fs-back"), *body, "</svg>", ""])


def rectangle(x: float, y: float, width: float, height: float, look: str, tip: str = "") -> str:
    """Return a rectangle of class ``look``; ``tip`` is shown under the pointer."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    inside = f"><title>{quoted(tip)}</title></rect>" if tip else "/>"
    return f'<rect class="{look}" {place}{inside}'


def line(x1: float, y1: float, x2: float, y2: float, look: str = "fs-edge-line") -> str:
    return f'<line class="{look}" x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"/>'


def text(x: float, y: float, words: str, look: str = "fs-ink", anchor: str = "start") -> str:
    return f'<text class="{look}" x="{number(x)}" y="{number(y)}" text-anchor="{anchor}">{quoted(words)}</text>'


def fitting(words: str, width: float) -> str:
    """Return as much of ``words`` as there is place for, with ``..`` for the rest; nothing where that says little."""
    place = int(width / CHARACTER)
    return words if len(words) <= place else f"{words[: place - 2]}.." if place >= 5 else ""


def number(x: float) -> str:
    """Return a coordinate, to a hundredth of a pixel."""
    return f"{x:.2f}".rstrip("0").rstrip(".")


def quoted(words: str) -> str:
    """Return any text, in a form that is valid in XML."""
    return escape(shown(words))


def drawing(layout: Layout, width: int = 960) -> str:
    """Return the picture as the text of an SVG file, ``width`` pixels wide."""
    inner, kinds = width - _LEFT - _RIGHT, alike(layout)
    body = [text(_LEFT, 22, fitting(repr(layout), inner)), *_ranks(layout, inner)]
    for i, kind in enumerate(kinds):
        body += [text(_LEFT, _TOP + 13 + i * _ROW, fitting(kind.title, inner))]
        body += _strip(kind, _TOP + 20 + i * _ROW, inner)
    end, lines = _TOP + len(kinds) * _ROW + 18, notes(layout)
    if any(b.numel > b.parameter_numel for b in layout.buffers.values()):
        lines.append("gray: padding, always zero")
    if layout.num_shards > _DRAWN:
        lines.append(f"edges between {layout.num_shards:,} shards are not drawn")
    body += [text(_LEFT, end + 16 * i, fitting(line, inner), "fs-faint") for i, line in enumerate(lines)]
    return document(width, end + 16 * len(lines), repr(layout), body)


def _strip(kind: Alike, y: float, width: float) -> Iterator[str]:
    b = kind.buffer
    at = lambda element: _LEFT + width * element / max(b.numel, 1)  # noqa: E731
    tip = f"padding: {b.numel - b.parameter_numel:,} elements, always zero"
    yield rectangle(_LEFT, y, width, _STRIP, "fs-rest", tip)
    for i, slot in enumerate(b.slots):
        left, right, on = at(slot.offset), at(slot.end), span(b, slot)
        where = f"on rank {on}" if on.isdigit() else f"on ranks {on}" if on else "on no rank"
        tip = f"{slot.name} {slot.shape}: {slot.numel:,} elements, {where}"
        yield rectangle(left, y, right - left, _STRIP, f"fs-hue{i % HUES}", tip)
        if name := fitting(kind.short(slot), right - left - 6):
            yield text((left + right) / 2, y + 17, name, anchor="middle")
    if b.num_shards <= _DRAWN:
        edges = (at(rank * b.shard_numel) for rank in range(b.num_shards + 1))
        yield from (line(x, y - 3, x, y + _STRIP + 3) for x in edges)


def _ranks(layout: Layout, width: float) -> Iterator[str]:
    """Yield the number of a rank above its column, or of every so many ranks."""
    number = layout.num_shards
    each = width / number
    every = next(n for n in (1, 2, 4, 8, *(16 << i for i in range(64))) if n * each >= 30)
    for rank in range(0, number, every):
        word = f"rank {rank}" if each * every >= 70 else str(rank)
        yield text(_LEFT + (rank + 0.5) * each, 50, word, "fs-faint", "middle")
