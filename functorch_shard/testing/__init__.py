"""For your tests: real gloo ranks in one call, exact counts of collectives, trees compared leaf by leaf.

``processes``: ``run_ranks`` and its processes. ``invariance``: programs that give the same on any ranks, and programs
with one wrong collective, which a test should notice. Nothing of the library imports it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..communication.collective import Collective, RecordMode
from ..training.elementwise import check_elementwise
from .invariance import Mutant, assert_rank_invariant, assert_trees_close, mutants
from .processes import RankError, run_ranks

__all__ = [
    "CollectiveCounter",
    "Mutant",
    "RankError",
    "assert_rank_invariant",
    "assert_trees_close",
    "check_elementwise",
    "count_collectives",
    "mutants",
    "run_ranks",
]


@dataclass
class CollectiveCounter:
    """What was issued while it was counting; ``counter["all_gather"]`` is a number of collectives."""

    issued: list[Collective] = field(default_factory=list)

    def __getitem__(self, kind: str) -> int:
        return self.by_kind[kind]

    @property
    def by_kind(self) -> Counter[str]:
        """The number of collectives of each kind."""
        return Counter(collective.kind for collective in self.issued)

    @property
    def total(self) -> int:
        """The number of collectives."""
        return len(self.issued)

    def nbytes(self, kind: str) -> int:
        """Bytes of the operands that one rank passed to collectives of ``kind``."""
        return sum(collective.nbytes for collective in self.issued if collective.kind == kind)


class count_collectives(RecordMode):  # noqa: N801  (used as a function)
    """Count the collectives issued inside a ``with`` block, exactly, on simulated and on real ranks.

    Returns:
        As the target of ``with``: a :class:`CollectiveCounter`, indexed by the name of the collective.

    Cost:
        Every torch operation inside is a little slower; nothing else changes.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> with count_collectives() as seen:
        ...     _ = mesh.spmd(lambda x: fs.collectives.psum(x, mesh))(torch.ones(2, 3))
        >>> seen["psum"], seen.nbytes("psum")
        (1, 12)
    """

    def __init__(self) -> None:
        self.counter = CollectiveCounter()
        super().__init__(self.counter.issued.append)

    def __enter__(self) -> CollectiveCounter:
        super().__enter__()
        return self.counter
