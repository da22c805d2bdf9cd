"""A layout as SVG, and SVG as text: rectangles, lines, texts and their colors, on a light or a dark background.

A picture has a strip for each buffer, cut at the shards, in which each parameter has its color. The strips are equally
wide, so a rank has the same place in each of them.

Note [Alike]: buffers that have the same slots, as those of transformer blocks, are shown once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from ..errors import shown
from ..layout.buffers import Buffer, Slot, dtype_name
from ..layout.layout import Layout, shards_of_ranks

_LEFT, _RIGHT, _TOP, _ROW, _STRIP = 16, 16, 64, 58, 26  # margins, and the heights of a row and of its strip
_DRAWN = 16  # shards, up to which the edges of each are drawn
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


@dataclass(frozen=True)
class Alike:
    """Buffers with the same slots: the first one, its unit, and how many there are."""

    buffer: Buffer
    unit: str
    count: int

    @property
    def title(self) -> str:
        return shown(self.buffer.key) + (f" x {self.count}" if self.count > 1 else "")

    def short(self, slot: Slot) -> str:
        """Return the name of a parameter without that of its unit."""
        return shown(slot.name.removeprefix(f"{self.unit}."))


def alike(layout: Layout) -> list[Alike]:
    """Return the kinds of buffers, in the layout's order; Note [Alike]."""
    found: dict[object, list[tuple[Buffer, str]]] = {}
    for name, buffer in ((unit.name, buffer) for unit in layout.units for buffer in unit.buffers):
        slots = tuple((s.name.removeprefix(f"{name}."), s.shape, s.offset, s.dtensor) for s in buffer.slots)
        kind = slots, buffer.dtype, buffer.label, buffer.trainable, buffer.num_shards, buffer.numel
        found.setdefault(kind, []).append((buffer, name))
    return [Alike(*same[0], len(same)) for same in found.values()]


def notes(layout: Layout) -> Iterator[str]:
    """Yield a line about the ranks that hold the same, and one about the names of one parameter."""
    if layout.num_ranks > layout.num_shards:
        ranks = shards_of_ranks(layout).flatten().eq(0).nonzero().flatten().tolist()
        yield f"{len(ranks)} replicas: rank 0 of the shard axis is ranks {', '.join(map(str, ranks))} of the mesh"
    if layout.aliases:
        yield f"tied: {', '.join(f'{alias} = {name}' for alias, name in layout.aliases)}"


def drawing(layout: Layout, width: int = 960) -> str:
    """Return the picture as the text of an SVG file, ``width`` pixels wide."""
    inner, kinds, number = width - _LEFT - _RIGHT, alike(layout), layout.num_shards
    body, lines = [text(_LEFT, 22, fitting(repr(layout), inner))], [*notes(layout)]
    if number <= _DRAWN:
        each = inner / number
        names = [f"rank {rank}" if each >= 50 else str(rank) for rank in range(number)]
        body += [text(_LEFT + (i + 0.5) * each, 50, name, "fs-faint", "middle") for i, name in enumerate(names)]
    for i, kind in enumerate(kinds):
        title = f"{kind.title}: {kind.buffer.shard_numel:,} {dtype_name(kind.buffer.dtype)} on each rank"
        body += [text(_LEFT, _TOP + 13 + i * _ROW, fitting(title, inner))]
        body += _strip(kind, _TOP + 20 + i * _ROW, inner)
    if any(b.numel > b.parameter_numel for b in layout.buffers.values()):
        lines.append("gray: padding, always zero")
    end = _TOP + len(kinds) * _ROW + 18
    body += [text(_LEFT, end + 16 * i, fitting(line, inner), "fs-faint") for i, line in enumerate(lines)]
    return document(width, end + 16 * len(lines), repr(layout), body)


def _strip(kind: Alike, y: float, width: float) -> Iterator[str]:
    b = kind.buffer
    at = lambda element: _LEFT + width * element / max(b.numel, 1)  # noqa: E731
    yield rectangle(_LEFT, y, width, _STRIP, "fs-rest")
    for i, slot in enumerate(b.slots):
        left, right = at(slot.offset), at(slot.end)
        tip = f"{slot.name} {slot.shape}: {slot.numel:,} elements"
        yield rectangle(left, y, right - left, _STRIP, f"fs-hue{i % HUES}", tip)
        if name := fitting(kind.short(slot), right - left - 6):
            yield text((left + right) / 2, y + 17, name, anchor="middle")
    if b.num_shards <= _DRAWN:
        edges = (at(rank * b.shard_numel) for rank in range(b.num_shards + 1))
        yield from (line(x, y - 3, x, y + _STRIP + 3) for x in edges)
