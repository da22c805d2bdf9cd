"""``fs.visualize``: which rank holds which part of which parameter, for the terminal, notebooks and files.

``text_table``: the picture of a layout in characters; ``svg``: it as SVG, and elements of SVG as text, which the
pictures of the documentation use too. Imports ``layout`` and ``errors``; imported by programs only.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..layout.layout import Layout
from ..layout.trees import check_layout
from . import svg, text_table


@dataclass(frozen=True)
class LayoutPicture:
    """A picture of a layout: ``print`` shows it in the terminal, a notebook as SVG; ``save`` writes a file."""

    layout: Layout

    def text(self, width: int | None = None) -> str:
        """Return the picture in plain characters, for ``width`` columns; by default those of the terminal."""
        return text_table.table(self.layout, width or shutil.get_terminal_size().columns)

    def svg(self, width: int = 960) -> str:
        """Return the text of an SVG file, ``width`` pixels wide, light or dark as the reader prefers."""
        return svg.drawing(self.layout, width)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file whose suffix is the format: ``.svg`` or ``.txt``."""
        path = Path(path)
        if path.suffix not in (".svg", ".txt"):
            raise ValueError(f"save: path: got {str(path)!r}, expected a name that ends with .svg or .txt")
        path.write_text(self.svg() if path.suffix == ".svg" else f"{self.text(120)}\n", encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return self.text()


def visualize(layout: Layout) -> LayoutPicture:
    """Draw which rank holds how many elements of which parameter, its padding, and which ranks are replicas.

    ``print`` shows it in the terminal, as wide as that is, and a notebook as SVG; ``.svg()`` is the text of a file,
    ``.save("layout.svg")`` writes one. What does not fit, as most of 512 ranks, is left out and counted.

    Args:
        layout: from :func:`plan`, for example ``params.layout``.

    Returns:
        A picture with ``.text(width)``, ``.svg(width)`` and ``.save(path)``.

    Raises:
        TypeError: ``layout`` is something else.

    Cost:
        No collectives and no tensors: a layout is integers.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        >>> print(visualize(fs.plan(model, fs.simulated_mesh({"replicate": 2, "shard": 3}))).text(60))
        Layout(2 units, 4 parameters, 25 elements, replicate=2 x shard=3)
        <BLANKLINE>
          rank                0  1  2
        <BLANKLINE>
        0: 3 shards of 7 float32
          weight   (4, 4)     7  7  2
          bias     (4,)       .  .  4
          padding             .  .  1
        <BLANKLINE>
        1: 3 shards of 2 float32
          weight   (1, 4)     2  2  .
          bias     (1,)       .  .  1
          padding             .  .  1
        <BLANKLINE>
        2 replicas: column r is on 2 ranks of the mesh, {0, 3}, {1, 4}, {2, 5}
    """
    check_layout("visualize", layout)
    return LayoutPicture(layout)
