"""Communication taken apart: what ``mesh.with_backend`` puts before ranks, to count, check or leave out collectives.

Every collective goes through :meth:`Axis.issue`, which describes it once, as a :class:`Collective`, and hands it to the
backend of the axis. A :class:`Backend` has one method that moves bytes, ``issue(op, x)``, which returns a
:class:`Work`. :meth:`Mesh.with_backend` makes a handle of the same ranks with functions before the backends: what was
passed last is asked first, so ``mesh.with_backend(skip("psum")).with_backend(counter)`` counts what the program issues,
and a counter that stands behind ``skip`` counts what is really sent.

Instead of ``register_comm_hook``, ``set_custom_all_gather`` or ``set_custom_reduce_scatter``, write a function
``(op, x, send) -> Work`` and pass ``wrap(function)``, or a backend of your own, before any wrap. Whatever it does,
derivatives are those of the true collectives, whose transposes go through it as well.

Here bytes move between the ranks of one axis. ``collective``, ``backend``: the interface; ``simulated``,
``process_group``: the backends, beside those of the packages ``gloo`` and ``sequential``; ``wrappers`` count and skip;
``recorded``: what tracers record. Imports ``torch_internals``, ``errors`` and ``containers`` alone; imported by
``gloo``, ``mesh`` and above.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .backend import Backend, Finished, Work, wrap
from .collective import Collective

if TYPE_CHECKING:
    from .wrappers import Counter, Traffic, skip

__all__ = [
    "Backend",
    "Collective",
    "Counter",
    "Finished",
    "Traffic",
    "Work",
    "skip",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in ("Counter", "Traffic", "skip"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".wrappers", __name__), name)
