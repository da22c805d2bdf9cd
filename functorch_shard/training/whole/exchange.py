"""Parts of parameters, sent to their owners and back: one message from each rank to each other one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...communication.axis import Axis
from ...communication.collective import Splits
from ...communication.work import Work
from .plan import Part

Place = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """The rows of each rank in tensors with batch dims in front, by the rank's position on the shard axis.

    A real rank has its own rows alone: one, or several if the user maps over parameters. Simulated ranks have those of
    all ranks; ``folded`` of those of one rank belong to ranks of other axes.
    """

    places: Mapping[int, Sequence[Place]]
    size: int
    stacked: bool
    folded: int

    @staticmethod
    def of(index: Tensor | int, others: Tensor | None, rows: Sequence[int], size: int) -> Rows:
        """From the operands that distinguish simulated ranks; ``rows`` are the sizes of the batch dims."""
        every = [*product(*map(range, rows))]
        if not isinstance(index, Tensor):
            return Rows({index: every}, size, False, 1)
        places: dict[int, list[Place]] = {}
        for place, rank in zip(every, index.flatten().tolist(), strict=True):
            places.setdefault(rank, []).append(place)
        dims = [] if others is None else [n for d, n in enumerate(rows) if (others != others.narrow(d, 0, 1)).any()]
        return Rows(dict(sorted(places.items())), size, True, torch.Size(dims).numel())

    @property
    def num_rows(self) -> int:
        """The rows of each rank."""
        return len(next(iter(self.places.values())))

    def others(self, rank: int) -> list[int]:
        """All ranks but one, in the order of messages."""
        return [other for other in range(self.size) if other != rank]


@dataclass(frozen=True)
class Exchange:
    """One message from each rank to each other one; a message has one row for each place of its rank."""

    axis: Axis | None
    rows: Rows

    def start(self, messages: Mapping[int, Tensor], splits: Splits) -> Work | None:
        """Send; ``messages`` are those of the ranks that are here."""
        if self.axis is None or not any(map(any, splits)):
            return None
        if not self.rows.stacked:
            (x,) = messages.values()
            return self.axis.issue("ragged_all_to_all", x, splits=splits)
        longest = max(x.shape[-1] for x in messages.values())
        stacked = torch.stack([pad(x, (0, longest - x.shape[-1])) for x in messages.values()])
        return replace(self.axis, folded=self.rows.folded).issue("ragged_all_to_all", stacked, splits=splits)

    def wait(self, work: Work | None) -> Mapping[int, Tensor]:
        """What each rank that is here received; nothing if nothing was sent."""
        if work is None:
            return {}
        result = work.wait()
        return dict(enumerate(result)) if self.rows.stacked else dict.fromkeys(self.rows.places, result)


def message(rows: Sequence[Sequence[Tensor]], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Each row's parts, one after the other."""
    if not rows[0]:
        return torch.empty(len(rows), 0, device=device, dtype=dtype)
    joined = [torch.cat([part.to(device, dtype) for part in parts]) for parts in rows]
    return torch.stack(joined) if len(joined) > 1 else joined[0][None]


def split(received: Tensor, parts: Sequence[Part]) -> Iterator[Tensor]:
    """The values of each part in a message, which may be followed by padding."""
    offset = 0
    for part in parts:
        yield received[:, offset : offset + part.numel]
        offset += part.numel
