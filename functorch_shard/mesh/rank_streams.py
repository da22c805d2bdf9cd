"""Random numbers of ranks that run one after the other: each has the generators of the process for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from ..communication.process_group import as_bytes


@dataclass(frozen=True)
class Streams:
    """The random numbers of all ranks, and of the process afterwards.

    ``"same"``: every rank starts where the process is, and the process goes on where rank 0 ended. ``"different"``:
    each starts at a seed that depends on its number and on where the process is, which goes on by one number if any of
    them drew.
    """

    randomness: str
    generators: Sequence[torch.Generator]
    before: Sequence[Tensor]
    of_ranks: Sequence[Sequence[Tensor]]

    @staticmethod
    def of(randomness: str, device: torch.device, num_ranks: int) -> Streams:
        index = torch.cuda.current_device() if device.index is None and device.type == "cuda" else device.index
        generators = [torch.default_generator]
        generators += [torch.cuda.default_generators[index]] if device.type == "cuda" else []
        before = [generator.get_state() for generator in generators]
        if randomness == "different":
            every = [
                [_seeded(generator, state, rank) for generator, state in zip(generators, before, strict=True)]
                for rank in range(num_ranks)
            ]
        else:
            every = [before] * num_ranks
        return Streams(randomness, generators, before, every)

    def go_on(self, after: Sequence[Sequence[Tensor]]) -> None:
        """Where the process is when all ranks have ended with the states ``after``."""
        drew = any(not torch.equal(x, y) for a, b in zip(self.of_ranks, after, strict=True) for x, y in zip(a, b))  # noqa: B905
        self.restore()
        if drew and self.randomness == "error":
            raise RuntimeError("spmd: random numbers were drawn, with randomness='error'.")
        if drew and self.randomness == "same":
            for generator, state in zip(self.generators, after[0], strict=True):
                generator.set_state(state)
        elif drew:
            for generator in self.generators:
                torch.rand((), generator=generator, device=generator.device)

    def restore(self) -> None:
        for generator, state in zip(self.generators, self.before, strict=True):
            generator.set_state(state)


def _seeded(generator: torch.Generator, state: Tensor, rank: int) -> Tensor:
    digest = blake2b(as_bytes(state) + rank.to_bytes(8, "big"), digest_size=8).digest()
    return torch.Generator(generator.device).manual_seed(int.from_bytes(digest, "big") >> 1).get_state()
