"""Communication taken apart: what ``mesh.with_backend`` puts before ranks, to count, check or leave out collectives.

Every collective goes through :meth:`Axis.issue`, which describes it once, as a :class:`Collective`, and hands it to the
backend of the axis, whose one method that moves bytes, ``issue(op, x)``, returns a :class:`Work`.
:meth:`Mesh.with_backend` puts functions before it. What was passed last is asked first: in
``mesh.with_backend(skip("psum")).with_backend(counter)`` the counter sees what the program issues.

Instead of ``register_comm_hook``, ``set_custom_all_gather`` or ``set_custom_reduce_scatter``, pass
``wrap(function)``, or before any wrap a backend of your own. Derivatives are those of the true collectives.

``collective``, ``backend``: the interface; ``process_group``: the backend of real ranks; ``wrappers`` count and skip;
``recorded``: what tracers record; ``writes``: those into what was gathered are refused. Imports ``torch_internals``,
``running``, ``errors`` and ``containers`` alone; imported by ``gloo``, ``mesh`` and above.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .backend import Backend, Finished, Work, wrap
from .collective import Collective

if TYPE_CHECKING:
    from .wrappers import Counter, Traffic, skip

__all__ = ["Backend", "Collective", "Counter", "Finished", "Traffic", "Work", "skip", "wrap"]


def __getattr__(name: str) -> Any:
    if name not in ("Counter", "Traffic", "skip"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".wrappers", __name__), name)
