"""Parts of parameters, sent to their owners and back: one message from each rank to each other one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..communication.axis import Axis
from ..communication.backend import Work
from ..communication.collective import Splits
from ..training.optimizer_step import Leaves
from .plan import Part

Place = tuple[int, ...]


@dataclass(frozen=True)
class Ranks:
    """The rows of each rank in tensors with batch dims in front, by the rank's position on the shard axis.

    A real rank has its own rows only: one, or several if the user maps over parameters. Simulated ranks have those of
    all ranks; ``folded`` of those of one rank belong to ranks of other axes.
    """

    places: Mapping[int, Sequence[Place]]
    size: int
    stacked: bool
    folded: int

    @staticmethod
    def of(place: Leaves, rows: Sequence[int], size: int) -> Ranks:
        """From the operands that distinguish simulated ranks; ``rows`` are the sizes of the batch dims."""
        index, others = place["index"], place["others"]
        every = [*product(*map(range, rows))]
        if not isinstance(index, Tensor):
            return Ranks({index: every}, size, False, 1)
        places: dict[int, list[Place]] = {}
        for row, rank in zip(every, index.flatten().tolist(), strict=True):
            places.setdefault(rank, []).append(row)
        dims = [] if others is None else [n for d, n in enumerate(rows) if (others != others.narrow(d, 0, 1)).any()]
        return Ranks(dict(sorted(places.items())), size, True, torch.Size(dims).numel())

    def others(self, rank: int) -> list[int]:
        """All ranks but one, in the order of messages."""
        return [other for other in range(self.size) if other != rank]

    def start(self, axis: Axis | None, messages: Mapping[int, Tensor], splits: Splits) -> Work | None:
        """Send one message from each rank to each other one, with one row for each place of its rank."""
        if axis is None or not any(map(any, splits)):
            return None
        if not self.stacked:
            (x,) = messages.values()
            return axis.issue("ragged_all_to_all", x, splits=splits)
        longest = max(x.shape[-1] for x in messages.values())
        padded = torch.stack([pad(x, (0, longest - x.shape[-1])) for x in messages.values()])
        return replace(axis, folded=self.folded).issue("ragged_all_to_all", padded, splits=splits)

    def wait(self, work: Work | None) -> Mapping[int, Tensor]:
        """What each rank that is here received; nothing if nothing was sent."""
        if work is None:
            return {}
        result = work.wait()
        return dict(enumerate(result)) if self.stacked else dict.fromkeys(self.places, result)


def message(rows: Iterable[Sequence[Tensor]], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Each row's parts, one after the other."""
    empty = torch.empty(0, device=device, dtype=dtype)
    return torch.stack([torch.cat([empty, *(part.to(device, dtype) for part in parts)]) for parts in rows])


def split(received: Tensor, parts: Sequence[Part]) -> Iterator[Tensor]:
    """The values of each part in a message, which may be followed by padding."""
    offset = 0
    for part in parts:
        yield received[:, offset : offset + part.numel]
        offset += part.numel
