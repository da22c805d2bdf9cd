"""Communication taken apart: backends for ``mesh.with_backend``, which count, check or leave out collectives.

A backend is one axis of a mesh at work, and :meth:`Mesh.with_backend` makes a handle of the same ranks with other
backends. They stand before each other: what was passed last is asked first, so
``mesh.with_backend(checked).with_backend(counter)`` counts what the program issues, and a counter that stands behind
``without_all_gather`` counts what is really sent.

Instead of ``register_comm_hook``, ``set_custom_all_gather`` or ``set_custom_reduce_scatter``, write a backend of your
own and pass a function from an axis to it: a :class:`Wrapper` that changes one thing, or a :class:`Backend` that moves
bytes itself. On real ranks a collective gets this rank's tensor and returns this rank's result. On simulated ranks
(``simulated``) it gets the values of all ranks stacked in dim 0, and returns one value for all (``all_gather``,
``psum``, ``pmax``) or a stack of one a rank (``psum_scatter``). Results are new memory, and the operand may be written
to as soon as the collective has returned (of a ``start_`` form: landed). All ranks must do the same in the same order.
Whatever the backend does, derivatives are those of the true collectives, whose transposes go through it as well.

Here bytes move between the ranks of one axis: ``backend``, ``gloo``, ``shared_memory``, ``headers``, ``dtypes``;
``axis`` is an axis with its backend; ``wrapper``, ``counter``, ``order_check``, ``lost_ranks`` stand before a backend;
``writes`` finds writes into what simulated ranks gathered. Imports ``torch_internals`` and ``errors`` alone; imported
by ``mesh`` and above.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .axis import Axis
from .backend import Backend, Flight
from .counter import Counter, Traffic
from .order_check import checked
from .wrapper import Wrapper

__all__ = ["Backend", "Counter", "Flight", "Traffic", "Wrapper", "checked", "without_all_gather", "without_reduction"]


def without_all_gather(axis: Axis) -> Backend:
    """Send no all-gather over ``axis``: results of the right shape and dtype whose numbers mean nothing.

    To see what gathering costs. Every rank's part is this rank's own, so that arithmetic on it takes as long as ever
    and indices stay valid. Results take memory as usual. What ``plan`` compares between ranks is still sent.

    Args:
        axis: as ``mesh.with_backend`` passes it: ``mesh.with_backend(fs.communication.without_all_gather)``.

    Returns:
        A backend that passes everything else on.

    Cost:
        No message; one copy of the result.

    Example:
        >>> mesh = fs.simulated_mesh(2).with_backend(fs.communication.without_all_gather)
        >>> rows = torch.tensor([[1, 2], [3, 4]])   # row r = rank r
        >>> mesh.spmd(lambda x: fs.collectives.all_gather(x, mesh), out_dims=None)(rows)
        tensor([1, 2, 1, 2])

    Stands for ``FSDP_USE_FAKE_ALL_GATHER``.
    """
    return _WithoutAllGather(axis.backend, axis.size)


def without_reduction(axis: Axis) -> Backend:
    """Send no reduction over ``axis``: results of the right shapes and dtypes, whose numbers mean nothing.

    That is ``psum_scatter``, ``psum``, ``pmax``, and the ``all_to_all`` of encoded gradients, to see what they cost.
    Every rank keeps what it had, as if it were alone. Results take memory as usual; what real ranks receive messages in
    does not.

    Args:
        axis: as ``mesh.with_backend`` passes it: ``mesh.with_backend(fs.communication.without_reduction)``.

    Returns:
        A backend that passes everything else on.

    Cost:
        No message; one copy of the result.

    Example:
        >>> mesh = fs.simulated_mesh(2).with_backend(fs.communication.without_reduction)
        >>> rows = torch.tensor([[1, 2], [30, 40]])   # row r = rank r
        >>> mesh.spmd(lambda x: fs.collectives.psum_scatter(x, mesh))(rows)
        tensor([[ 1],
                [40]])

    Stands for ``FSDP_USE_FAKE_REDUCE``.
    """
    return _WithoutReduction(axis.backend, axis.size)


@dataclass(frozen=True)
class _WithoutAllGather(Wrapper):
    size: int

    def announce(self, kind: str, numel: int, dtype: torch.dtype, key: str = "") -> None:
        if kind != "all_gather":
            super().announce(kind, numel, dtype, key)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x[0] if self.simulated else x] * self.size, dim)


@dataclass(frozen=True)
class _WithoutReduction(Wrapper):
    size: int

    def announce(self, kind: str, numel: int, dtype: torch.dtype, key: str = "") -> None:
        if kind not in ("psum_scatter", "psum", "pmax", "all_to_all"):
            super().announce(kind, numel, dtype, key)

    def psum_scatter(self, x: Tensor, dim: int) -> Tensor:
        if self.simulated:
            return torch.stack([self._part(row, dim, rank) for rank, row in enumerate(x.unbind(0))])
        return self._part(x, dim, int(self.index())).clone()

    def psum(self, x: Tensor) -> Tensor:
        return (x[0] if self.simulated else x).clone()

    def pmax(self, x: Tensor) -> Tensor:
        return self.psum(x)

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        return x.clone()

    def _part(self, x: Tensor, dim: int, rank: int) -> Tensor:
        return x.unflatten(dim, (self.size, x.shape[dim] // self.size)).select(dim, rank)
