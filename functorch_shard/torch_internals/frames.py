"""The stack: torch's only record of some things that are going on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def callers(frame: FrameType | None = None) -> Iterator[FrameType]:
    """``frame``, by default the caller's, and those that called it, innermost first."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_at(frame: FrameType, place: tuple[str, str]) -> bool:
    """Whether ``frame`` runs the function ``place``: its module and its name."""
    return frame.f_code.co_name == place[1] and frame.f_globals.get("__name__") == place[0]
