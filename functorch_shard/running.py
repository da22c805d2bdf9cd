"""What runs here: the context variable that a function reads where torch calls it, and hands it no argument of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Run:
    """What runs here."""

    indices: Mapping[Any, Tensor] = field(default_factory=dict)  # of batched ranks: by axis, outermost first
    rank: int | None = None  # of ranks that run one after the other: which one this is
    gathered: Any = None  # what simulated ranks gathered; None outside of spmd
    watcher: Any = None  # what fs.debug.types shows Functions to, and what batched ranks take and return
    held: int = 0  # how many jvps only hold the level of forward mode
    recorded: bool = False  # whether a collective is recorded and not issued


RUN: ContextVar[Run] = ContextVar("what runs here", default=Run())  # noqa: B039


@contextmanager
def running(indices: Mapping[Any, Tensor] | None = None, **changes: Any) -> Iterator[None]:
    """A context whose :class:`Run` has these ``indices`` besides its own, and other changes."""
    before = RUN.get()
    token = RUN.set(replace(before, indices={**before.indices, **(indices or {})}, **changes))
    try:
        yield
    finally:
        RUN.reset(token)
