"""Collectives with exact derivatives, under every transform and at every order.

Loaded on first use are ``primitives``: ``psum``, ``pmean``, ``pmax``, ``pmin``, ``all_gather``, ``psum_scatter``,
``axis_index``; and ``exchanges``: ``all_to_all``, ``ragged_all_to_all``, ``ppermute``, ``broadcast``. ``rules``: their
derivatives, and those of the data-parallel gather of a buffer, Note [Schedule]. ``sinks``: where gradients of gathered
parameters go, and who takes the mean over ranks, the backward of each gather or ``fs.grad`` at its end.

Imports ``mesh``, ``communication`` and below; imported by ``layout`` and above.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exchanges import all_to_all, broadcast, ppermute, ragged_all_to_all
    from .primitives import all_gather, axis_index, pmax, pmean, pmin, psum, psum_scatter

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "broadcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "ragged_all_to_all",
]
_EXCHANGES = ("all_to_all", "broadcast", "ppermute", "ragged_all_to_all")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".exchanges" if name in _EXCHANGES else ".primitives", __name__), name)
