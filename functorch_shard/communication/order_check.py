"""All ranks issue the same collectives, or every rank is told the first one that differs, and who did not come.

A collective that other ranks do not issue hangs, or worse, adds up what does not belong together. Gloo ranks find out
when it is there (Note [Envelopes] in headers.py), and are out of step then; ranks of other libraries never do. So
before each one the ranks tell each other what they are about to issue. Messages go their own way, in the order of the
calls: the k-th of one rank meets the k-th of every other, even when the collectives behind them would not.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from .axis import Axis
from .backend import Backend, GroupBackend, RollCall
from .wrapper import Run, Wrapper

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
        axis: the axis to check, as ``through`` passes it.

    Returns:
        A backend whose collectives raise before they are issued if ranks differ. Simulated ranks and a single one are
        one program and cannot differ: their backend itself.

    Raises:
        TypeError: the bytes are moved by something other than a process group.
        RuntimeError: later, from a collective, on every rank that is there: the ranks issue different ones, or some did
            not come within the process group's timeout (they stalled, raised, or ended). It names these ranks, what
            each of the others wanted, and the last few collectives before. Ranks are numbered as in the process group.

    Cost:
        A gloo group on the host beside each axis, and before each collective one all-to-all of 512 bytes for each pair
        of ranks, which all ranks wait for: about as long as a ``psum`` of a few numbers takes. For debugging.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> fs.communication.checked(mesh["shard"]) is mesh["shard"].backend   # simulated ranks cannot differ
        True

    Stands for the execution order check of FSDP1 under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
    """
    carrier = axis.backend.carrier
    if carrier.simulated or axis.size == 1:
        return axis.backend
    if not isinstance(carrier, GroupBackend):
        raise TypeError(
            f"checked: axis {axis.name!r}: got a {type(carrier).__name__}, expected a process group to exchange "
            "messages in. Take the mesh from init_mesh, and wrap its backends instead of replacing them."
        )
    return _Checked(axis.backend, axis.name, RollCall(carrier.group))


@dataclass(frozen=True, eq=False)
class _Checked(Wrapper):
    axis: str
    roll_call: RollCall
    numbers: count[int] = field(default_factory=lambda: count(1))
    history: deque[str] = field(default_factory=lambda: deque(maxlen=HISTORY + 1))

    def announce(self, kind: str, numel: int, dtype: torch.dtype, key: str = "") -> None:
        purpose = f" for {key!r}" if key else ""
        mine = f"{next(self.numbers)}: {kind} of {numel:,} {str(dtype).removeprefix('torch.')}{purpose}"
        self._check(mine, list(self.history)[-HISTORY:])
        self.history.append(mine)
        super().announce(kind, numel, dtype, key)

    def _check(self, mine: str, before: list[str]) -> None:
        text = mine.encode()
        message = (hashlib.sha256(text).digest() + text)[:MESSAGE].ljust(MESSAGE)
        messages, error = self.roll_call.exchange(message)
        if error or len(set(messages.values())) > 1:
            raise RuntimeError(self._explained(mine, messages, before, error)) from error

    def _explained(
        self, mine: str, messages: Mapping[int, bytes], before: list[str], error: RuntimeError | None
    ) -> str:
        wanted = {rank: message[32:].decode(errors="ignore").rstrip() for rank, message in messages.items()}
        lines = [f"  rank {rank}: {text}" for rank, text in sorted(wanted.items())]
        lines += [f"  rank {rank}: did not come" for rank in self.roll_call.ranks if rank not in wanted]
        title = f"checked: axis {self.axis!r}: " + (self._absence(mine, wanted) if error else "the ranks differ.")
        return "\n".join([title, *lines, *_past(before), _ADVICE, *([f"torch said: {error}"] if error else [])])

    def _absence(self, mine: str, wanted: Mapping[int, str]) -> str:
        absent = ", ".join(str(rank) for rank in self.roll_call.ranks if rank not in wanted)
        who = f"no message from rank {absent}" if absent else "a rank was gone again"
        return (
            f"{who} before collective {mine}. Each waits {self.roll_call.timeout.total_seconds():g} s for the others, "
            "and who gives up or ends is gone for all."
        )

    def around(self, kind: str) -> Run:
        mine, before = self.history[-1] if self.history else kind, list(self.history)[:-1]

        def explained(part: Callable[[], Any]) -> Any:
            try:
                return part()
            except (NotImplementedError, torch.OutOfMemoryError):  # RuntimeErrors, but not for want of the others
                raise
            except RuntimeError as error:
                text = f"checked: axis {self.axis!r}: all ranks agreed on {mine}, and then it failed: {error}"
                raise RuntimeError("\n".join([text, *_past(before)])) from error

        return explained


def _past(before: list[str]) -> list[str]:
    return ["Before that, the same on all ranks:", *(f"  {text}" for text in before)] if before else []
