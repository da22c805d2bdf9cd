"""What is communicated, as a value: every collective is described once, where it is issued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..torch_internals.autograd import TorchDispatchMode, active_modes, profiler_enabled
from ..torch_internals.tensors import FakeTensor

# A marker in the dispatcher for every collective, on real and on simulated ranks: profiles show it by name, and
# testing.count_collectives sees it in any thread and below any transform, without state of ours.
LIBRARY = torch.library.Library("functorch_shard", "FRAGMENT")
LIBRARY.define("collective(str kind, str axis, int numel, ScalarType dtype, str key) -> ()")
LIBRARY.impl("collective", lambda kind, axis, numel, dtype, key: None, "CompositeExplicitAutograd")
RECORD = torch.ops.functorch_shard.collective.default
# A collective in a graph, and what waits for it: Note [Recorded] in recorded.py.
LIBRARY.define(
    "start(Tensor x, str ranks, str kind, str axis, int numel, ScalarType dtype, str key, int dim, Device? device, "
    "int source, bool transient, int width, int[] splits) -> Tensor"
)
LIBRARY.define("wait(Tensor started, Tensor x, SymInt[] shape, ScalarType dtype, Device device) -> Tensor")
START = torch.ops.functorch_shard.start.default
WAIT = torch.ops.functorch_shard.wait.default


Splits = tuple[tuple[int, ...], ...]
Rows = Sequence[Tensor]


@dataclass(frozen=True)
class Kind:
    """The law of one kind of collective: all that backends, wrappers, tracers and simulated ranks know of it.

    Note [Kinds]: rank i has a part for each rank j, and rank j combines what all ranks have for it. Without ``parts``
    each has its whole operand for all, and all get one value. From this follow the results of simulated ranks, the
    messages of gloo ranks, shapes and traffic. A process group sends the parts by ``all_to_all_single``, unless
    ``GroupBackend`` has a method with a faster collective of torch, ``_psum`` for ``"psum"``.

    Args:
        combine: ``combine(op, rows, lead)``: the result, in new memory, of what each rank has for this one, in rank
            order. In front of the dims of one rank's value are ``lead`` more.
        parts: ``parts(op, x, rank, size, lead)``: what ``rank``, whose operand is ``x``, has for each.
        shape: ``shape(op, shape, i, j)``: the shape of what rank i has for rank j, from that of any rank's operand.
            Without it all ranks have operands of one shape, and ``parts`` are rows of one tensor.
        reduces: whether ``combine`` works element by element.
        alike: whether all ranks get one value, whatever the parts are.
        begins: whether it is neither recorded nor skipped, as what only begins a program.
    """

    combine: Callable[[Collective, Rows, int], Tensor]
    parts: Callable[[Collective, Tensor, int, int, int], Any] | None = None
    shape: Callable[[Collective, torch.Size, int, int], Sequence[int]] | None = None
    reduces: bool = False
    alike: bool = False
    begins: bool = False

    @property
    def is_scattered(self) -> bool:
        """Whether each rank has a result of its own."""
        return self.parts is not None and not self.alike

    def sent(self, nbytes: int, size: int) -> int:
        """Return the bytes that each of ``size`` ranks has to send at least, for an operand of ``nbytes``."""
        if self.shape:
            return nbytes
        if not self.parts and not self.reduces:
            return nbytes * (size - 1)
        return -(-nbytes * (size - 1) * (1 if self.parts else 2) // size)

    def of_all_ranks(self, op: Collective, xs: Tensor | Rows, size: int) -> Any:
        """Return the results, one for each rank, from the operands of all; one for all ranks where they are alike."""
        if self.parts and self.shape:
            each = [self.parts(op, x, rank, size, 0) for rank, x in enumerate(xs)]
            made = [self.combine(op, [parts[i] for parts in each], 0) for i in range(1 if self.alike else size)]
            return made[0] if self.alike else made
        x = xs if isinstance(xs, Tensor) else torch.stack([*xs])
        if x.dtype != op.dtype or op.device not in (None, x.device):
            x = x.to(op.device or x.device, op.dtype)
        rows = self.parts(op, x, 0, size, 1).unbind(1) if self.parts else x.unbind(0)
        return self.combine(op, rows, int(self.parts is not None))


def sum_in_rank_order(rows: Rows) -> Tensor:
    """The sum from the first to the last, rounded after each addend."""
    if len(rows) == 1:
        return rows[0].clone()
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total = total + row
    return total


class Subtree(NamedTuple):
    """The sum of ``size`` leaves from ``start`` on: Note [Tree]."""

    start: int
    size: int
    sum: Any


def add_in_tree(sums: list[Subtree], new: Subtree) -> None:
    """Add ``new`` to the sums of the leaves before it.

    Note [Tree]: the order of additions depends on the numbers of leaves, and not on who adds them up. The sum of 2^k
    leaves from a multiple of 2^k on is that of its two halves; of other leaves there are several sums.
    """
    start, size, total = new
    while sums and sums[-1].size == size and sums[-1].start % (2 * size) == 0:
        start, _, left = sums.pop()
        size, total = 2 * size, left + total
    sums.append(Subtree(start, size, total))


def sums_in_tree(leaves: Sequence[Any], start: int) -> list[Subtree]:
    """The sums of leaves that are numbered from ``start`` on."""
    sums = list[Subtree]()
    for i, leaf in enumerate(leaves):
        add_in_tree(sums, Subtree(start + i, 1, leaf))
    return sums


def _rows_in_tree(op: Collective, rows: Rows, lead: int) -> Tensor:
    first, *others = [each.sum for each in sums_in_tree(rows, op.source)]
    return torch.stack([first, *others], lead) if others else first.unsqueeze(lead)


def parts_along(dim: int, x: Tensor, size: int) -> Tensor:
    """``x`` cut into ``size`` equal parts of ``dim``, which are in dim 0."""
    return x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0)


def _permuted(op: Collective, x: Tensor, rank: int, size: int, lead: int) -> Rows:
    """``x`` for whom ``rank`` sends it to; and for itself zeros, if nobody sends it something."""
    parts = [x if (rank, to) in op.splits else x.new_empty(0) for to in range(size)]
    if all(to != rank for _, to in op.splits):
        parts[rank] = torch.zeros_like(x)
    return parts


def _permuted_shape(op: Collective, shape: torch.Size, i: int, j: int) -> Sequence[int]:
    arrives = (i, j) in op.splits if i != j else all(to != j or sender == j for sender, to in op.splits)
    return shape if arrives else (0,)


KINDS = {
    # The values of all ranks along op.dim; an exchange is one of what ranks compare about their programs.
    "all_gather": Kind(gather := lambda op, rows, lead: torch.cat([*rows], op.dim)),
    "exchange": Kind(gather, begins=True),
    # The sum, or the largest values, over ranks.
    "psum": Kind(add := lambda op, rows, lead: sum_in_rank_order(rows), reduces=True),
    "pmax": Kind(lambda op, rows, lead: torch.stack([*rows]).amax(0), reduces=True),
    # Of the sum over ranks, this rank's part of op.dim.
    "psum_scatter": Kind(add, lambda op, x, rank, size, lead: parts_along(op.dim + lead, x, size), reduces=True),
    # The same in a fixed order, Note [Tree]: rank i has the leaf op.source + i, and each sum of leaves is a row.
    "sums_in_tree": Kind(_rows_in_tree, lambda op, x, rank, size, lead: parts_along(lead, x, size), begins=True),
    # Row r of op.dim of each rank, for rank r.
    "all_to_all": Kind(
        lambda op, rows, lead: torch.stack([*rows], op.dim + lead),
        lambda op, x, rank, size, lead: x.movedim(op.dim + lead, 0),
    ),
    # op.splits[i][j] elements of the last dim from rank i to rank j, in the order of j in what i passes.
    "ragged_all_to_all": Kind(
        lambda op, rows, lead: torch.cat([*rows], -1),
        lambda op, x, rank, size, lead: x[..., : sum(op.splits[rank])].split(op.splits[rank], -1),
        lambda op, shape, i, j: (*shape[:-1], op.splits[i][j]),
    ),
    # For rank j the operand of rank i, where (i, j) is in op.splits, and zeros where nothing arrives.
    "ppermute": Kind(
        lambda op, rows, lead: max(rows, key=lambda row: (row.numel(), row.ndim)).clone(), _permuted, _permuted_shape
    ),
    # The operand of rank op.source; the others pass one of its shape.
    "broadcast": Kind(
        lambda op, rows, lead: rows[op.source].clone(),
        lambda op, x, rank, size, lead: [x if rank == op.source else x.new_empty(0)] * size,
        lambda op, shape, i, j: shape if i == op.source else (0,),
        alike=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, as every rank of an axis issues it.

    Args:
        kind: a name of ``KINDS``, such as ``"psum"``; or one that only a backend of your own knows.
        axis: the name of the axis.
        numel: elements of the operand of one rank; where operands of ranks have different shapes, the mean over ranks
            of what each sends to the others.
        dtype: of what is sent; the operand is cast to it on the way.
        key: the buffer that it is for, such as ``"blocks.0"``, where that is known.
        dim: where ranks are laid side by side, or what is split between them.
        device: where the result is to be; ``None``: where the operand is.
        source: the rank of the axis whose values a ``"broadcast"`` sends; the first leaf of ``"sums_in_tree"``.
        transient: whether the result is freed soon: it may be memory of a host that is copied where it is written to.
        splits: of a ``"ragged_all_to_all"``: row i has the number of elements that rank i sends to each rank. Of a
            ``"ppermute"``: pairs of a rank and the one that it sends to.
    """

    kind: str
    axis: str
    numel: int
    dtype: torch.dtype
    key: str = ""
    dim: int = 0
    device: torch.device | None = None
    source: int = 0
    transient: bool = False
    splits: Splits = ()

    @property
    def law(self) -> Kind:
        """What ranks do in it."""
        if self.kind not in KINDS:
            raise NotImplementedError(f"there is no collective {self.kind!r}: expected one of {', '.join(KINDS)}")
        return KINDS[self.kind]

    @property
    def nbytes(self) -> int:
        """Bytes of the operand of one rank."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        purpose = f" for {self.key!r}" if self.key else ""
        return f"{self.kind} of {self.numel:,} {str(self.dtype).removeprefix('torch.')}{purpose}"


collective = lru_cache(maxsize=4096)(Collective)  # a program issues the same few again and again


@lru_cache(maxsize=4096)
def describe(op: Collective) -> str:
    """Describe all that ranks compare of a collective: what it is, and how operands and results are laid out."""
    rest = (f", {name} {x}" for name in ("dim", "source", "splits") if (x := getattr(op, name)))
    return "".join([str(op), *rest])


def is_watched() -> bool:
    """Whether a dispatch mode, or the profiler, sees what is computed here.

    If torch counted neither, collectives would be missing in a trace or a profile; tests count them there.
    """
    return bool(active_modes()) or profiler_enabled()


def record(op: Collective) -> None:
    """Show ``op`` to profilers and to ``testing.count_collectives``."""
    if is_watched():
        RECORD(op.kind, op.axis, op.numel, op.dtype, op.key)


def started_by(args: Sequence[Any]) -> Collective:
    """What ``start`` with these arguments starts, as :data:`RECORD` shows it."""
    return Collective(*args[2:7])


class RecordMode(TorchDispatchMode):
    """While it is entered, ``found`` gets each collective that this thread records, in order."""

    def __init__(self, found: Callable[[Collective], None]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is RECORD:
            self.found(Collective(*args))
        if func is START:
            self.found(started_by(args))
        if any(kind not in (Tensor, Parameter, FakeTensor) for kind in types):
            # a subclass: what it does below, as the collectives of a lazy tensor, is seen one by one
            return NotImplemented
        return func(*args, **(kwargs or {}))
