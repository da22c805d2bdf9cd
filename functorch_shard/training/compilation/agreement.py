"""Ranks that record: the same collectives on all of them, or the same error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .recording import Recording

_ADVICE = (
    "Every rank must call a compiled step with the same structure and shapes, and issue the same collectives in the "
    "same order: no branch of the step may depend on the rank or on its data."
)


def agreed(build: Callable[[], Recording], meshes: Sequence[Any]) -> Recording:
    """``build()``, compared with what the other ranks of the first mesh record.

    Without one, collectives that do not belong together are found where they meet, over gloo.
    """
    return meshes[0].agree("compile", build, _lines, _ADVICE) if meshes else build()


def _lines(recording: Recording) -> list[str]:
    return [f"{i}: {op} over {op.axis!r}" for i, op in enumerate(recording.collectives)] + ["end of the step"]
