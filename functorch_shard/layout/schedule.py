"""The operations that gather one buffer and reduce its gradient, as tuples, without tensors.

Note [Schedule]: a shard becomes the whole buffer by ``gather``; a full gradient becomes the exact sum over the ranks
that share the buffer by ``within``, the transpose of ``gather``; that sum becomes the mean over all ranks by
``across``::

    gather   Cast(gathered), AllGather(shard axis)
    within   Cast(reduced), Divide(before), ReduceScatter(shard axis), Cast(carried), Divide(1 / before)
    across   Divide(before), Cast(reduced), AllReduce(each axis of copies), Cast(carried), Divide(after)

Without a shard axis there is no ``AllGather`` and ``within`` is a cast; divisions by 1 are left out. ``before`` is a
power of two, so a division by it is undone exactly. Three interpreters follow these tuples, so their numbers are equal
bitwise: ``sharding.data_parallel`` (differentiable), ``sharding.reduction`` (asynchronous) and ``training.estimate``.
A compiler sees what these issue: Note [Recorded] in communication/recorded.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isclose, prod
from typing import Any, Protocol

import torch
from torch import Tensor

from .precision import BufferDtypes


@dataclass(frozen=True, slots=True)
class Cast:
    """Elements in another dtype."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Divide:
    """Elements divided by a number."""

    by: float


class Encoding(Protocol):
    """What a gather sends in place of elements; ``fs.codecs`` has some."""

    def encode(self, x: Tensor) -> tuple[Tensor, Any]:
        """Encode each row of the last dim as one message of bytes; and what decodes it."""
        ...

    def decode(self, messages: Tensor, form: Any) -> Tensor:
        """Decode messages of the last dim."""
        ...

    def recode(self, x: Tensor) -> Tensor:
        """Encode and decode; the derivative is the identity's."""
        ...


@dataclass(frozen=True, slots=True)
class AllGather:
    """The operands of all ranks side by side; with a ``codec``, what it makes of each of them."""

    axis: str
    codec: Encoding | None = None


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """This rank's part of the sum of the operands of all ranks."""

    axis: str


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The sum of the operands of all ranks."""

    axis: str


Local = Cast | Divide
Communication = AllGather | ReduceScatter | AllReduce
Op = Local | Communication
Ops = tuple[Op, ...]


@dataclass(frozen=True)
class Schedule:
    """The operations of one buffer; see Note [Schedule]."""

    key: str  # of the buffer: ranks compare it where they compare collectives
    dtypes: BufferDtypes
    gather: Ops
    within: Ops
    across: Ops
    mean_is_transpose: bool  # whether ``across`` is the transpose of making equal copies

    @property
    def reduce(self) -> Ops:
        """A full gradient to the shard of the mean (or the sum) over all ranks, in the dtype to return."""
        return (*self.within, *self.across, Cast(self.dtypes.returned))

    @cached_property
    def has_mean(self) -> bool:
        """Whether the mean over all ranks differs from the transpose of ``gather``."""
        return any(not isinstance(op, Cast) for op in self.across)

    @cached_property
    def shard_axis(self) -> str | None:
        """The axis that the buffer is gathered over."""
        return next((op.axis for op in self.gather if isinstance(op, AllGather)), None)

    @cached_property
    def has_copies(self) -> bool:
        """Whether the mean over all ranks is a sum over copies of the shard."""
        return any(isinstance(op, AllReduce) for op in self.across)

    @cached_property
    def pieces(self) -> tuple[tuple[Ops, Communication | None], ...]:
        """``across`` in pieces with one communication each, and that one; none if there is no mean to take."""
        ends = [i + 1 for i, op in enumerate(self.across) if not isinstance(op, Local)]
        cuts = [0, *ends[:-1], len(self.across)] if self.has_mean else []
        pieces = [self.across[start:end] for start, end in pairwise(cuts)]
        return tuple((ops, up_to_communication(ops)[1]) for ops in pieces)

    @cached_property
    def divisor(self) -> float:
        """What the sum over all ranks is divided by."""
        return prod(op.by for op in self.across if isinstance(op, Divide))


def make_schedule(
    key: str, dtypes: BufferDtypes, shard_axis: str | None, copies: Mapping[str, int], divisors: tuple[float, float]
) -> Schedule:
    """The operations of buffer ``key``, sharded over ``shard_axis``; ``copies``: how many each other axis has."""
    before, after = divisors
    gather, within = [Cast(dtypes.gathered)], [Cast(dtypes.carried)]
    if shard_axis is not None:
        gather = [*gather, AllGather(shard_axis)]
        within = [Cast(dtypes.reduced), *_divide(before), ReduceScatter(shard_axis), *within, *_divide(1 / before)]
    sums = [op for axis in copies for op in (Cast(dtypes.reduced), AllReduce(axis))] or [Cast(dtypes.reduced)]
    across = (*_divide(before), *sums, Cast(dtypes.carried), *_divide(after))
    transposes = isclose(before * after, prod(copies.values()))
    return Schedule(key, dtypes, tuple(gather), tuple(within), across, transposes)


def _divide(by: float) -> Iterator[Divide]:
    if by != 1:
        yield Divide(by)


def gathered_encoded(ops: Ops, dtypes: BufferDtypes, codec: Encoding) -> Ops:
    """``ops`` of a gather that moves what ``codec`` makes of the stored shards."""
    encoded = [AllGather(op.axis, codec) for op in ops if isinstance(op, AllGather)]
    return (Cast(dtypes.stored), *encoded, Cast(dtypes.gathered)) if encoded else ops


def up_to_communication(ops: Ops) -> tuple[Ops, Communication | None, Ops]:
    """The local operations in front, the first communication, and the operations after it."""
    for i, op in enumerate(ops):
        if not isinstance(op, Local):
            return ops[:i], op, ops[i + 1 :]
    return ops, None, ()
