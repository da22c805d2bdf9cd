"""``fs.visualize``: which rank holds which part of which parameter, for the terminal, notebooks and files.

``svg``: the picture of a layout as SVG, and elements of SVG as text, which the pictures of the documentation use too.
Imports ``layout`` and ``errors``; imported by programs only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import table
from ..layout.buffers import dtype_name
from ..layout.layout import Layout
from ..layout.trees import check_layout
from . import svg

_RANKS = 8  # that have a column


@dataclass(frozen=True)
class LayoutPicture:
    """A picture of a layout: ``print`` shows it in the terminal, a notebook as SVG."""

    layout: Layout

    def __str__(self) -> str:
        ranks, lines = range(min(self.layout.num_shards, _RANKS)), [*svg.notes(self.layout)]
        rows: list[list[object]] = []
        for kind in svg.alike(self.layout):
            b = kind.buffer
            held = [[b.part(slot, rank).numel for rank in ranks] for slot in b.slots]
            for slot, each in zip(b.slots, held, strict=True):
                rows.append([kind.title, kind.short(slot), slot.shape, dtype_name(slot.dtype), *each])
            padding = [b.shard_numel - sum(each) for each in zip(*held, strict=True)]
            rows += [[kind.title, "padding", "", "", *padding]] if any(padding) else []
        if self.layout.num_shards > _RANKS:
            lines.insert(0, f"and {self.layout.num_shards - _RANKS:,} more ranks")
        header = ["buffer", "parameter", "shape", "dtype", *(f"rank {rank}" for rank in ranks)]
        return "\n".join([repr(self.layout), "", table(rows, header, left=4), *lines])

    def svg(self, width: int = 960) -> str:
        """Return the text of an SVG file, ``width`` pixels wide, light or dark as the reader prefers."""
        return svg.drawing(self.layout, width)

    _repr_svg_ = svg


def visualize(layout: Layout) -> LayoutPicture:
    """Draw which rank holds how many elements of which parameter, its padding, and which ranks are replicas.

    ``print`` shows it in the terminal as a table of the first ranks, which counts the others, and a notebook as SVG.

    Args:
        layout: from :func:`plan`, for example ``params.layout``.

    Returns:
        A picture: its ``str`` is the table, and ``.svg(width)`` the text of an SVG file.

    Raises:
        TypeError: ``layout`` is something else.

    Cost:
        No collectives and no tensors: a layout is integers.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        >>> print(visualize(fs.plan(model, fs.simulated_mesh({"replicate": 2, "shard": 3}))))
        Layout(2 units, 4 parameters, 25 elements, replicate=2 x shard=3)
        <BLANKLINE>
        buffer  parameter  shape   dtype    rank 0  rank 1  rank 2
        ----------------------------------------------------------
        0       weight     (4, 4)  float32       7       7       2
        0       bias       (4,)    float32       0       0       4
        0       padding                          0       0       1
        1       weight     (1, 4)  float32       2       2       0
        1       bias       (1,)    float32       0       0       1
        1       padding                          0       0       1
        2 replicas: rank 0 of the shard axis is ranks 0, 3 of the mesh
    """
    check_layout("visualize", layout)
    return LayoutPicture(layout)
