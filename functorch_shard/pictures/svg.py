"""SVG as text: rectangles, lines, texts and their colors, on a light or a dark background."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ..errors import shown

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
