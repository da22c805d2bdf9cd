"""What is sent, over which axis, and how long the program waits for it: numbers in an object that the user holds."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from functools import partial
from threading import Lock

from torch import Tensor

from .axis import Axis
from .backend import Backend, Finished, Issue, Work, Wrapped
from .collective import Collective


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one axis, as one rank saw them; traffic adds up.

    Args:
        number: how many were issued.
        nbytes: bytes of the operands that this rank passed.
        sent: bytes that each rank has to send for them at least: ``N - 1`` times the operand of an ``all_gather`` or an
            ``exchange``, that of a ``scatter`` or a ``ragged_all_to_all`` (the mean over ranks),
            ``(N - 1) / N`` of a ``psum_scatter``'s or ``all_to_all``'s, ``2 (N - 1) / N`` of a ``psum``'s or
            ``pmax``'s, rounded up.
        seconds: from the start to the end of waiting.
        blocked: of these, the seconds that the program spent in starting and in waiting; in the others it computed.
    """

    number: int = 0
    nbytes: int = 0
    sent: int = 0
    seconds: float = 0.0
    blocked: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class Counter:
    """Counts what goes through it: ``mesh.with_backend(counter)``, then ``counter["shard", "all_gather"]``.

    It sees every collective of the handle that :meth:`Mesh.with_backend` returns, in whatever thread it is issued, on
    real and on simulated ranks, and on both counts what one rank does. What ``plan`` compares between ranks has the
    kind ``"exchange"``. One counter may count several meshes. Times are those of the host: on CUDA, of issuing.

    Example:
        >>> counter = fs.communication.Counter()
        >>> mesh = fs.simulated_mesh(2).with_backend(counter)
        >>> _ = mesh.spmd(lambda x: fs.collectives.psum_scatter(x, mesh))(torch.ones(2, 4))
        >>> seen = counter["shard", "psum_scatter"]
        >>> seen.number, seen.nbytes, seen.sent   # half of 4 float32
        (1, 16, 8)
    """

    def __init__(self) -> None:
        self._traffic: dict[tuple[str, str], Traffic] = {}
        self._lock = Lock()

    def __call__(self, axis: Axis) -> Backend:
        """What :meth:`Mesh.with_backend` asks for each axis."""
        return Wrapped(axis.backend, partial(self._count, axis))

    def _count(self, axis: Axis, op: Collective, x: Tensor, send: Issue) -> Work:
        if not axis.backend.is_counted:
            return send(op, x)
        start = time.perf_counter()
        work = send(op, x)  # where it may be refused
        issued = time.perf_counter()
        passed = issued - start
        self.add(op.axis, op.kind, Traffic(1, op.nbytes, bytes_sent(op.kind, op.nbytes, axis.size), passed, passed))

        def wait() -> Tensor:
            again = time.perf_counter()
            result = work.wait()
            end = time.perf_counter()
            self.add(op.axis, op.kind, Traffic(seconds=end - issued, blocked=end - again))
            return result

        return work if isinstance(work, Finished) else Work(wait)

    def __getitem__(self, axis_and_kind: tuple[str, str]) -> Traffic:
        return self.traffic.get(axis_and_kind, Traffic())

    @property
    def traffic(self) -> dict[tuple[str, str], Traffic]:
        """What was counted so far, by axis and kind, in order of first use."""
        with self._lock:
            return dict(self._traffic)

    @property
    def total(self) -> Traffic:
        """Over all axes and kinds."""
        return sum(self.traffic.values(), Traffic())

    def add(self, axis: str, kind: str, traffic: Traffic) -> None:
        """Count ``traffic``, as a backend of your own might."""
        with self._lock:
            self._traffic[axis, kind] = self._traffic.get((axis, kind), Traffic()) + traffic

    def clear(self) -> None:
        """Start again from nothing."""
        with self._lock:
            self._traffic.clear()

    def __str__(self) -> str:
        lines = ["axis       kind          number         bytes          sent   seconds   blocked"]
        for (axis, kind), t in self.traffic.items():
            sums = f"{t.number:8,d} {t.nbytes:13,d} {t.sent:13,d} {t.seconds:9.3f} {t.blocked:9.3f}"
            lines.append(f"{axis:10s} {kind:12s} {sums}")
        return "\n".join(lines)


def bytes_sent(kind: str, nbytes: int, size: int) -> int:
    """What each of ``size`` ranks has to send at least, for an operand of ``nbytes``; see :class:`Traffic`."""
    if kind in ("all_gather", "exchange"):
        return nbytes * (size - 1)
    if kind in ("scatter", "broadcast", "ragged_all_to_all"):
        return nbytes  # to the other ranks, by one of them
    return -(-nbytes * (size - 1) * (1 if kind in ("psum_scatter", "all_to_all") else 2) // size)
