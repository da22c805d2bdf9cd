"""A backend whose collectives go through a function first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from .axis import Axis
from .backend import Backend
from .collective import Collective
from .work import Work

Issue = Callable[[Collective, Tensor], Work]
Wrap = Callable[[Collective, Tensor, Issue], Work]


def wrap(fn: Wrap) -> Callable[[Axis], Backend]:
    """Have ``fn`` called for every collective of a mesh, in whatever thread: ``mesh.with_backend(wrap(fn))``.

    Args:
        fn: ``fn(op, x, send)`` gets the :class:`Collective`, its operand, and what would issue it. It returns a
            :class:`Work`: that of ``send(op, x)``, of another collective or operand, changed by :meth:`Work.then`, or
            one of its own. :class:`Backend` says what ``x`` and the result are, on real and on simulated ranks.

    Returns:
        A function for :meth:`Mesh.with_backend`, from an axis to its backend behind ``fn``. Derivatives are those of
        the true collectives, whose transposes go through ``fn`` as well.

    Cost:
        That of ``fn``. All ranks have to wrap alike. Sequential simulated ranks each call ``fn``.

    Example:
        >>> import dataclasses
        >>> @fs.communication.wrap
        ... def half_sums(op, x, send):
        ...     half = dataclasses.replace(op, dtype=torch.bfloat16)
        ...     return send(half, x.bfloat16()).then(lambda total: total.to(x.dtype))
        >>> mesh = fs.simulated_mesh(2).with_backend(half_sums)
        >>> rows = torch.tensor([256.0, 1.0])   # row r = rank r; bfloat16 has no 257
        >>> mesh.spmd(lambda x: fs.collectives.psum(x, mesh))(rows)
        tensor([256., 256.])
    """
    return lambda axis: Wrapped(axis.backend, fn)


@dataclass(frozen=True)
class Wrapped(Backend):
    """``inner``, whose collectives go through ``fn``."""

    inner: Backend
    fn: Wrap

    @property
    def simulated(self) -> bool:
        return self.inner.simulated

    @property
    def in_rank(self) -> bool:
        return self.inner.in_rank

    @property
    def is_counted(self) -> bool:
        return self.inner.is_counted

    def index(self) -> Tensor | int:
        return self.inner.index()

    def level(self) -> Tensor | int:
        return self.inner.level()

    def rows(self, size: int) -> int:
        return self.inner.rows(size)

    def others(self) -> Tensor | None:
        return self.inner.others()

    def ready(self) -> object:
        return self.inner.ready()

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        return self.fn(op, x, self.inner.issue)


def transport(backend: Backend) -> Backend:
    """What moves the bytes in the end, behind all wrappers."""
    while isinstance(backend, Wrapped):
        backend = backend.inner
    return backend


def with_transport(backend: Backend, change: Callable[[Backend], Backend]) -> Backend:
    """``backend`` with ``change`` of its transport, behind the same wrappers, which see every collective as before."""
    if isinstance(backend, Wrapped):
        return replace(backend, inner=with_transport(backend.inner, change))
    return change(backend)
