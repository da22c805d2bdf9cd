"""The shape and placements of a DTensor: integers and names, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import axes_text


@dataclass(frozen=True, slots=True)
class DTensorForm:
    """The shape of a DTensor and its placements along the axes of its device mesh.

    ``placements`` has one entry for each of ``axes``: ``"S(dim)"`` for sharded along ``dim``, ``"R"`` for replicated.
    """

    shape: tuple[int, ...]
    placements: tuple[str, ...]
    axes: tuple[tuple[str, int], ...]

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def cut_over(self) -> tuple[str, ...]:
        """The axes whose ranks hold different elements, which a norm sums over; the ranks of others hold copies."""
        return tuple(name for name, text in zip(self.axis_names, self.placements, strict=True) if text != "R")

    def local_shape(self, place: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of rank ``place[i]`` of each axis, chunked like ``torch.chunk``, axis after axis."""
        return self._local_part(place)[0]

    def local_start(self, place: Sequence[int]) -> tuple[int, ...]:
        """The start of that part in each dim of the whole."""
        return self._local_part(place)[1]

    def _local_part(self, place: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape, start = list(self.shape), [0] * len(self.shape)
        for (_, size), text, index in zip(self.axes, self.placements, place, strict=True):
            if text != "R":
                dim = int(text[2:-1])
                chunk = -(-shape[dim] // size)
                skipped = min(index * chunk, shape[dim])
                start[dim] += skipped
                shape[dim] = min(chunk, shape[dim] - skipped)
        return tuple(shape), tuple(start)

    def __str__(self) -> str:
        return f"DTensor of shape {self.shape}, {' '.join(self.placements)} over {axes_text(dict(self.axes))}"
