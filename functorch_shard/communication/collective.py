"""What is communicated, as a value: every collective is described once, where it is issued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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
    "int source, bool transient) -> Tensor"
)
LIBRARY.define("wait(Tensor started, Tensor x, SymInt[] shape, ScalarType dtype, Device device) -> Tensor")
START = torch.ops.functorch_shard.start.default
WAIT = torch.ops.functorch_shard.wait.default


Splits = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, as every rank of an axis issues it.

    Args:
        kind: ``"all_gather"``, ``"psum_scatter"``, ``"psum"``, ``"pmax"``, ``"all_to_all"``, ``"ragged_all_to_all"``,
            ``"scatter"``, ``"broadcast"``; or ``"exchange"``, an all-gather of what ranks compare about their programs.
        axis: the name of the axis.
        numel: elements of the operand of one rank; of a ``"scatter"``, of what one rank receives; of a
            ``"ragged_all_to_all"``, the mean over ranks of what each sends to the others.
        dtype: of what is sent. An ``"all_gather"`` casts its operand to it on the way.
        key: the buffer that it is for, such as ``"blocks.0"``, where that is known.
        dim: where ranks are laid side by side, or what is split between them.
        device: where the result is to be; ``None``: where the operand is.
        source: the rank of the axis whose values a ``"scatter"`` or a ``"broadcast"`` sends.
        transient: whether the result is freed soon: it may be memory of a host that is copied where it is written to.
        splits: of a ``"ragged_all_to_all"``: row i has the number of elements that rank i sends to each rank.
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
    if torch.compiler.is_compiling() or is_watched():
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
