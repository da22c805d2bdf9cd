"""Pictures for the terminal, for notebooks and as files: which rank holds what, and what a step does in which order."""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from .layout import drawing, picture
from .layout.layout import Layout
from .training.compilation import timeline
from .training.compilation.schedule import StepSchedule


class Picture(ABC):
    """``print`` shows it in the terminal, a notebook as SVG; ``save`` writes a file."""

    @abstractmethod
    def text(self, width: int | None = None) -> str:
        """The picture in plain characters, for ``width`` columns; by default those of the terminal."""

    @abstractmethod
    def svg(self, width: int = 960) -> str:
        """The text of an SVG file, ``width`` pixels wide, light or dark as the reader prefers."""

    def _forms(self) -> Mapping[str, Callable[[], str]]:
        return {".svg": self.svg, ".txt": lambda: f"{self.text(120)}\n"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file whose suffix is the format: ``.svg``, ``.txt``, and of a timeline ``.json``."""
        forms, path = self._forms(), Path(path)
        if path.suffix not in forms:
            raise ValueError(f"save: path: got {str(path)!r}, expected a name that ends with {', '.join(forms)}")
        path.write_text(forms[path.suffix](), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True)
class LayoutPicture(Picture):
    """Which rank holds how many elements of which parameter, its padding, and which ranks are replicas."""

    layout: Layout

    def text(self, width: int | None = None) -> str:
        return picture.text(self.layout, width or shutil.get_terminal_size().columns)

    def svg(self, width: int = 960) -> str:
        return drawing.drawing(self.layout, width)


@dataclass(frozen=True)
class Timeline(Picture):
    """Starts, waits, computation and bytes alive of a step, over the order of its operations, which is not time."""

    schedule: StepSchedule

    def text(self, width: int | None = None) -> str:
        """The table that ``print(schedule)`` shows, whatever the width."""
        return str(self.schedule)

    def svg(self, width: int = 960) -> str:
        return timeline.drawing(self.schedule, width)

    def chrome_trace(self) -> dict[str, Any]:
        """What chrome://tracing and Perfetto read, once it is JSON (``save("step.json")``); 1 us is one operation."""
        return timeline.chrome_trace(self.schedule)

    def _forms(self) -> Mapping[str, Callable[[], str]]:
        return {**super()._forms(), ".json": lambda: json.dumps(self.chrome_trace())}

    def __repr__(self) -> str:
        return f"Timeline({timeline.summary(self.schedule)})"


@overload
def visualize(what: Layout) -> LayoutPicture: ...


@overload
def visualize(what: StepSchedule) -> Timeline: ...


def visualize(what: Layout | StepSchedule) -> LayoutPicture | Timeline:
    """Make a picture: which rank holds which part of which parameter, or what a recorded step does in which order.

    ``print`` shows it in the terminal, as wide as that is, and a notebook as SVG; ``.svg()`` is the text of a file,
    ``.save("step.svg")`` writes one. What does not fit, as most of 512 ranks, is left out and counted. The
    timeline of a step has ``.chrome_trace()``, for chrome://tracing and Perfetto.

    Args:
        what: a layout, or a schedule: ``compile(step).trace(...)`` or one of ``compiled.schedules``.

    Returns:
        A picture with ``.text(width)``, ``.svg(width)`` and ``.save(path)``.

    Raises:
        TypeError: ``what`` is something else.

    Cost:
        No collectives and no tensors: a layout is integers, a schedule was recorded before.

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
    if isinstance(what, Layout):
        return LayoutPicture(what)
    if isinstance(what, StepSchedule):
        return Timeline(what)
    known = "a Layout, for example params.layout, or a StepSchedule, for example compiled.schedules[0]"
    raise TypeError(f"visualize: what: got {type(what).__name__}, expected {known}")
