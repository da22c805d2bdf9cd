"""For your tests: real gloo ranks in one call, exact counts of collectives, trees compared leaf by leaf.

``processes``: ``run_ranks`` and its processes. Nothing of the library imports it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from ..communication.collective import Collective, RecordMode
from ..containers import opened, place
from ..training.elementwise import check_elementwise
from .processes import RankError, run_ranks

__all__ = [
    "CollectiveCounter",
    "RankError",
    "assert_trees_close",
    "check_elementwise",
    "count_collectives",
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


def assert_trees_close(actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Raise unless two pytrees have one structure and close leaves; every leaf that differs is named.

    Args:
        actual: the tree under test.
        expected: what it should be; dtypes count. Mappings are compared by key: a ``Full`` and a ``dict`` are alike.
        rtol, atol: as in ``torch.testing.assert_close``; by default those of the dtype. They count for tensors, arrays
            of numpy, floats and complex numbers, of which NaN equals NaN; everything else has to be equal.

    Raises:
        AssertionError: a line for each leaf that is missing, too much, or different.

    Example:
        >>> assert_trees_close({"a": torch.ones(2)}, {"a": torch.ones(2) + 1e-9})
        >>> assert_trees_close({"a": torch.ones(2)}, {"a": torch.zeros(2)})
        Traceback (most recent call last):
        AssertionError: 1 leaf differs:
          ['a']: Tensor-likes are not close!
            Mismatched elements: 2 / 2 (100.0%)
            Greatest absolute difference: 1.0 at index (0,) (up to 1e-05 allowed)
            Greatest relative difference: inf at index (0,) (up to 1.3e-06 allowed)
    """
    got, want = _leaves(actual), _leaves(expected)
    problems = [f"{path}: missing" for path in want if path not in got]
    problems += [f"{path}: not expected" for path in got if path not in want]
    for path in got.keys() & want.keys():
        problems += _difference(path, got[path], want[path], rtol, atol)
    if problems:
        count = "1 leaf differs" if len(problems) == 1 else f"{len(problems)} leaves differ"
        raise AssertionError("\n  ".join([f"{count}:", *sorted(problems)]))


def _leaves(tree: Any) -> dict[str, Any]:
    paths, leaves, _ = optree.tree_flatten_with_path(opened(tree), none_is_leaf=True)
    return {place(path) or "the tree": x for path, x in zip(paths, leaves, strict=True)}


def _difference(path: str, got: Any, want: Any, rtol: float | None, atol: float | None) -> list[str]:
    tensors = isinstance(got, Tensor) and isinstance(want, Tensor)
    if not tensors and (type(got) is not type(want) or not _has_tolerance(got)):
        return [] if type(got) is type(want) and got == want else [f"{path}: got {got!r}, expected {want!r}"]
    try:
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return [f"{path}: " + str(error).replace("\n\n", "\n").replace("\n", "\n    ")]
    return []


def _has_tolerance(x: Any) -> bool:
    """Whether it is a float, a complex number, or an array of numbers of numpy."""
    return isinstance(x, (float, complex)) or getattr(getattr(x, "dtype", None), "kind", None) in {*"biufc"}
