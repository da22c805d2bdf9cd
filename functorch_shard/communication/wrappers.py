"""Wrappers of a backend: they count collectives, or leave them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from ..errors import reject
from ..running import RUN
from .backend import Axis, Finished, Issue, Work, wrap
from .collective import KINDS, Collective


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one axis, as one rank saw them; traffic adds up.

    Args:
        number: how many were issued.
        nbytes: bytes of the operands that this rank passed.
        sent: bytes that each rank has to send for them at least: ``N - 1`` times the operand of an ``all_gather``,
            ``(N - 1) / N`` of a ``psum_scatter``'s or ``all_to_all``'s, ``2 (N - 1) / N`` of a ``psum``'s or
            ``pmax``'s, rounded up. Where ranks send different numbers, as in a ``ppermute``, a ``ragged_all_to_all`` or
            a ``broadcast``, their mean.
    """

    number: int = 0
    nbytes: int = 0
    sent: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.number + other.number, self.nbytes + other.nbytes, self.sent + other.sent)


class Counter:
    """Counts what goes through it: ``mesh.with_backend(counter)``, then ``counter["shard", "all_gather"]``.

    It sees every collective of the handle that :meth:`Mesh.with_backend` returns, in whatever thread it is issued, on
    real and on simulated ranks, and on both counts what one rank does. What ``plan`` compares between ranks has the
    kind ``"exchange"``. One counter may count several meshes.

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

    def __call__(self, axis: Axis) -> Axis:
        """What :meth:`Mesh.with_backend` asks for each axis."""

        def count(op: Collective, x: Tensor, send: Issue) -> Work:
            work = send(op, x)  # where it may be refused
            if not RUN.get().rank:  # of ranks that share this counter, one is counted
                one, key = Traffic(1, op.nbytes, op.law.sent(op.nbytes, axis.size)), (op.axis, op.kind)
                with self._lock:
                    self._traffic[key] = self._traffic.get(key, Traffic()) + one
            return work

        return wrap(count)(axis)

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

    def clear(self) -> None:
        """Start again from nothing."""
        with self._lock:
            self._traffic.clear()


def skip(*kinds: str) -> Callable[[Axis], Axis]:
    """Send no collective of these kinds: results have the right shapes and dtypes, and numbers that mean nothing.

    For :meth:`Mesh.with_backend`. Every rank keeps what it has, as if it were alone: a gather has this rank's own part
    in the place of each, so indices stay valid. What ``plan`` compares between ranks is still sent.

    Args:
        kinds: such as ``"all_gather"``. Gradients are reduced by ``"psum_scatter"``, between replicas by ``"psum"``.

    Returns:
        A function from an axis to the same ranks, which passes everything else on.

    Raises:
        ValueError: another kind.

    Cost:
        No message; one copy of the result.

    Example:
        >>> mesh = fs.simulated_mesh(2).with_backend(fs.communication.skip("psum_scatter", "psum"))
        >>> rows = torch.tensor([[1, 2], [30, 40]])   # row r = rank r
        >>> mesh.spmd(lambda x: fs.collectives.psum_scatter(x, mesh))(rows)
        tensor([[ 1],
                [40]])
    """
    known = [kind for kind, law in KINDS.items() if not law.begins and kind != "ragged_all_to_all"]
    unknown = [f"{kind!r}: expected one of {', '.join(known)}" for kind in kinds if kind not in known]
    reject("skip", unknown, "Name kinds of collectives, as skip('all_gather').")

    def skipping(axis: Axis) -> Axis:
        def issue(op: Collective, x: Tensor, send: Issue) -> Work:
            return Finished(_own(op, x, axis)) if op.kind in kinds else send(op, x)

        return wrap(issue)(axis)

    return skipping


def _own(op: Collective, x: Tensor, axis: Axis) -> Tensor:
    """What the ranks would get that have this rank's part for each other: of a reduction, that part alone."""
    law, size, simulated = op.law, axis.size, axis.backend.simulated
    x = x.to(op.device or x.device, op.dtype)
    results = list[Tensor]()
    for rank, own in enumerate(x) if simulated else [(int(axis.backend.index()), x)]:
        if law.parts and not law.shape:  # of a permutation, or the value of one rank, results have the operand's shape
            own = law.parts(op, own, rank, size, 0)[rank]
        results.append(law.combine(op, [own] * (1 if law.reduces else size), 0))
    return torch.stack(results) if simulated and law.is_scattered else results[0]
