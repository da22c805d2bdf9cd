"""A backend that stands before another: what it does not change, it passes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .backend import Backend, Flight

Run = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Wrapper(Backend):
    """Passes every collective on to ``inner``: the base of a backend of your own that changes one thing.

    Override ``announce`` to be told of each collective before it is issued, ``around`` to run its parts yourself, or a
    collective to do it differently. A collective that is overridden without its ``start_`` form is also what that form
    does, so that lazily gathered parameters, and gradients that are reduced while backward goes on, never go past it;
    write both to keep communication under computation.

    Args:
        inner: the backend of an axis, as ``mesh["shard"].backend``.

    Example:
        >>> class HalfSums(fs.communication.Wrapper):
        ...     def psum(self, x):
        ...         return self.inner.psum(x.bfloat16()).to(x.dtype)
        >>> mesh = fs.simulated_mesh(2).with_backend(lambda axis: HalfSums(axis.backend))
        >>> rows = torch.tensor([256.0, 1.0])   # row r = rank r; bfloat16 has no 257
        >>> mesh.spmd(lambda x: fs.collectives.psum(x, mesh))(rows)
        tensor([256., 256.])
    """

    inner: Backend

    def __init_subclass__(cls) -> None:
        for name in ("all_gather", "psum_scatter"):
            if name in vars(cls) and f"start_{name}" not in vars(cls):
                setattr(cls, f"start_{name}", getattr(Backend, f"start_{name}"))

    @property
    def simulated(self) -> bool:
        return self.inner.simulated

    @property
    def carrier(self) -> Backend:
        return self.inner.carrier

    def index(self) -> Tensor | int:
        return self.inner.index()

    def others(self) -> Tensor | None:
        return self.inner.others()

    def ready(self) -> None:
        self.inner.ready()

    def announce(self, kind: str, numel: int, dtype: torch.dtype, key: str = "") -> None:
        self.inner.announce(kind, numel, dtype, key)

    def around(self, kind: str) -> Run:
        """For one collective, what runs its parts: all of it, or first its start and later its landing."""
        return _just_run

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self.around("all_gather")(lambda: self.inner.all_gather(x, dim))

    def psum_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.around("psum_scatter")(lambda: self.inner.psum_scatter(x, dim))

    def psum(self, x: Tensor) -> Tensor:
        return self.around("psum")(lambda: self.inner.psum(x))

    def pmax(self, x: Tensor) -> Tensor:
        return self.around("pmax")(lambda: self.inner.pmax(x))

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        return self.around("all_to_all")(lambda: self.inner.all_to_all(x, dim))

    def scatter(self, out: Tensor, rows: Tensor | None, source: int) -> None:
        self.around("scatter")(lambda: self.inner.scatter(out, rows, source))

    def broadcast(self, x: Tensor, source: int) -> None:
        self.around("broadcast")(lambda: self.inner.broadcast(x, source))

    def exchange(self, rows: Tensor) -> Tensor:
        return self.around("exchange")(lambda: self.inner.exchange(rows))

    def start_all_gather(
        self, x: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Flight:
        run = self.around("all_gather")
        flight = run(lambda: self.inner.start_all_gather(x, dtype, device))
        return Flight([], lambda: run(flight.land))

    def start_psum_scatter(self, x: Tensor) -> Flight:
        run = self.around("psum_scatter")
        flight = run(lambda: self.inner.start_psum_scatter(x))
        return Flight([], lambda: run(flight.land))


def _just_run(part: Callable[[], Any]) -> Any:
    return part()
