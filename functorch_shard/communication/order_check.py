"""All ranks issue the same collectives, or every rank raises the first one that differs, and who did not respond.

A collective that other ranks do not issue hangs, or worse, adds up what does not belong together. Gloo ranks find out
when it is there (Note [Envelopes] in headers.py), and are out of step then; ranks of other libraries never do. So
before each one the ranks send each other what they are about to issue. Messages go their own way, in the order of the
calls: the k-th of one rank meets the k-th of every other, even when the collectives behind them would not.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals.process_groups import timeout_of
from .axis import Axis
from .backend import Backend
from .collective import Collective
from .process_group import GroupBackend, as_bytes
from .work import Finished, Work
from .wrapper import Issue, Wrapped, transport

T = TypeVar("T")
MESSAGE = 512  # bytes: a digest, and as much of the text as fits
HISTORY = 5  # how many collectives before the failing one an error shows
_ADVICE = (
    "Every rank must use the same parameters in the same order: look for a branch, a loop or an early return that "
    "depends on the rank or its data."
)


def checked(axis: Axis) -> Backend:
    """Before each collective over ``axis``, make sure that all of its ranks are about to issue the same one.

    For :meth:`Mesh.with_backend`, which every rank calls: ``mesh =
    fs.init_mesh().with_backend(fs.communication.checked)``. Compared are the number in order, the kind, the elements of
    the operand and their dtype, and the buffer it is for. Nothing that is computed changes.

    Args:
        axis: the axis to check, as ``with_backend`` passes it.

    Returns:
        A backend whose collectives raise before they are issued if ranks differ. Simulated ranks and a single one are
        one program and cannot differ: their backend itself.

    Raises:
        TypeError: the bytes are moved by something other than a process group.
        RuntimeError: later, from a collective, on every rank that responds: the ranks issue different ones, or some did
            not respond within the process group's timeout (stalled, raised or exited). It names these ranks, what each
            of the others issued, and the last few collectives before. Ranks are numbered as in the process group.

    Cost:
        A gloo group on the host beside each axis, and before each collective one all-to-all of 512 bytes for each pair
        of ranks, which all ranks wait for: about as long as a ``psum`` of a few numbers takes. For debugging.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> fs.communication.checked(mesh["shard"]) is mesh["shard"].backend   # simulated ranks cannot differ
        True

    Stands for the execution order check of FSDP1 under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
    """
    group = transport(axis.backend)
    if group.simulated or axis.size == 1:
        return axis.backend
    if not isinstance(group, GroupBackend):
        raise TypeError(
            f"checked: axis {axis.name!r}: got a {type(group).__name__}, expected a process group to exchange "
            "messages in. Take the mesh from init_mesh, and wrap its backends instead of replacing them."
        )
    return Wrapped(axis.backend, _Checks(axis.name, SideChannel(group.group)))


@dataclass(frozen=True, eq=False)
class _Checks:
    """Compares each collective over one axis before it goes on."""

    axis: str
    channel: SideChannel
    numbers: count[int] = field(default_factory=lambda: count(1))
    history: deque[str] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def __call__(self, op: Collective, x: Tensor, send: Issue) -> Work:
        mine, before = f"{next(self.numbers)}: {op}", list(self.history)
        self._check(mine, before)
        self.history.append(mine)
        run = partial(self._run, mine, before)
        work = run(lambda: send(op, x))
        return work if isinstance(work, Finished) else Work(lambda: run(work.wait))

    def _check(self, mine: str, before: list[str]) -> None:
        text = mine.encode()
        message = (hashlib.sha256(text).digest() + text)[:MESSAGE].ljust(MESSAGE)
        messages, error = self.channel.exchange(message)
        if error or len(set(messages.values())) > 1:
            raise RuntimeError(self._explained(mine, messages, before, error)) from error

    def _explained(
        self, mine: str, messages: Mapping[int, bytes], before: list[str], error: RuntimeError | None
    ) -> str:
        issued = {rank: message[32:].decode(errors="ignore").rstrip() for rank, message in messages.items()}
        lines = [f"  rank {rank}: {text}" for rank, text in sorted(issued.items())]
        lines += [f"  rank {rank}: did not respond" for rank in self.channel.ranks if rank not in issued]
        title = f"checked: axis {self.axis!r}: " + (self._absence(mine, issued) if error else "the ranks differ.")
        return "\n".join([title, *lines, *_past(before), _ADVICE, *([f"torch said: {error}"] if error else [])])

    def _absence(self, mine: str, issued: Mapping[int, str]) -> str:
        absent = ", ".join(str(rank) for rank in self.channel.ranks if rank not in issued)
        who = f"rank {absent} did not respond" if absent else "a rank stopped responding"
        return (
            f"{who} before collective {mine}. Each waits {self.channel.timeout.total_seconds():g} s for the others; "
            "a rank that gave up or exited does not respond to any."
        )

    def _run(self, mine: str, before: list[str], part: Callable[[], T]) -> T:
        try:
            return part()
        except (NotImplementedError, torch.OutOfMemoryError):  # RuntimeErrors, but not because of other ranks
            raise
        except RuntimeError as error:
            text = f"checked: axis {self.axis!r}: all ranks agreed on {mine}, and then it failed: {error}"
            raise RuntimeError("\n".join([text, *_past(before)])) from error


def _past(before: list[str]) -> list[str]:
    return ["Before that, the same on all ranks:", *(f"  {text}" for text in before)] if before else []


class SideChannel:
    """Short messages between the ranks of a group: on the host, beside whatever is under way in the group itself.

    Every rank of the group makes one at the same time. It waits as long as the group does.
    """

    def __init__(self, group: Any) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.timeout: timedelta = timeout_of(group)
        self._group = dist.new_group(self.ranks, self.timeout, "gloo", use_local_synchronization=True)

    def exchange(self, message: bytes) -> tuple[dict[int, bytes], RuntimeError | None]:
        """The messages by rank, as long as this one, of those that responded; why not all did. None is all zeros."""
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8).repeat(len(self.ranks), 1)
        got, error = torch.zeros_like(sent), None
        try:
            dist.all_to_all_single(got, sent, group=self._group)  # each directly from its sender
        except RuntimeError as caught:
            error = caught
        rows = [as_bytes(row) for row in got]
        return {rank: row for rank, row in zip(self.ranks, rows, strict=True) if any(row)}, error
