"""Frames of the stack, where torch keeps the only record of some calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def callers() -> Iterator[FrameType]:
    """The frame of the caller and those that called it, innermost first; of this thread alone."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_at(frame: FrameType, place: tuple[str, str]) -> bool:
    """Whether ``frame`` runs the function ``place``: (module, name)."""
    return frame.f_code.co_name == place[1] and frame.f_globals.get("__name__") == place[0]
