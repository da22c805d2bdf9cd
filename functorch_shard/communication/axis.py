"""One axis of a mesh: its name, its size, and the backend that moves bytes between its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .backend import Backend, DetachedBackend, record


@dataclass(frozen=True, eq=False)
class Axis:
    """One named direction of a mesh, as ``mesh["shard"]``: what a collective communicates over."""

    name: str
    size: int
    backend: Backend = field(repr=False)
    folded: int = field(default=1, repr=False)  # values of other simulated ranks inside an operand; see collectives
    key: str = field(default="", repr=False)  # of the buffer that is communicated: ranks compare it where they compare

    def __reduce__(self) -> tuple[Any, ...]:
        # A process group does not travel; a simulated axis is pickled with its mesh.
        rank = 0 if self.backend.simulated else int(self.backend.index())
        return Axis, (self.name, self.size, DetachedBackend(rank))

    def announce(self, kind: str, numel: int, dtype: torch.dtype, key: str = "") -> None:
        """Tell whoever listens that each rank is about to pass ``numel`` elements to a collective."""
        record(kind, self.name, numel, dtype)
        self.backend.announce(kind, numel, dtype, key or self.key)

    def of(self, key: str) -> Axis:
        """The same ranks, for what belongs to buffer ``key``."""
        return replace(self, key=key)
