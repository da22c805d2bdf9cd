"""Communication taken apart: backends for ``mesh.with_backend``, which count, check or leave out collectives.

Every collective goes through :meth:`Axis.issue`, which describes it once, as a :class:`Collective`, and hands it to the
backend of the axis. A :class:`Backend` has one method that moves bytes, ``issue(op, x)``, which returns a
:class:`Work`. :meth:`Mesh.with_backend` makes a handle of the same ranks with other backends. They stand before each
other: what was passed last is asked first, so ``mesh.with_backend(checked).with_backend(counter)`` counts what the
program issues, and a counter that stands behind ``without_all_gather`` counts what is really sent.

Instead of ``register_comm_hook``, ``set_custom_all_gather`` or ``set_custom_reduce_scatter``, write a function
``(op, x, send) -> Work`` and pass ``wrap(function)``, or a backend of your own that moves bytes itself. Whatever it
does, derivatives are those of the true collectives, whose transposes go through it as well.

Here bytes move between the ranks of one axis. ``collective``, ``work``, ``backend``: the interface; ``simulated``,
``process_group``, ``gloo`` with ``shared_memory``, ``shared_results``, ``headers`` and ``dtypes``:
the backends; ``simulated_group``: what ``torch.distributed`` is inside of simulated ranks;
``at_exit``: what is under way when a process ends; ``axis`` is an axis with its backend, ``group_axis``
one of real ranks, ``joint`` several as one; ``recorded``: what tracers record; ``wrapper``, ``counter``,
``order_check``, ``lost_ranks``, ``separate_groups``, ``without`` stand before a backend; ``writes`` finds writes into
what simulated ranks gathered. Imports ``torch_internals``, ``errors``, ``containers`` and ``eager`` alone; imported by
``mesh`` and above.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .backend import Backend
from .collective import Collective
from .work import Finished, Work
from .wrapper import wrap

if TYPE_CHECKING:
    from .counter import Counter, Traffic
    from .order_check import checked
    from .separate_groups import separate_reductions
    from .without import without_all_gather, without_reduction

__all__ = [
    "Backend",
    "Collective",
    "Counter",
    "Finished",
    "Traffic",
    "Work",
    "checked",
    "separate_reductions",
    "without_all_gather",
    "without_reduction",
    "wrap",
]

_ON_FIRST_USE = {
    "Counter": ".counter",
    "Traffic": ".counter",
    "checked": ".order_check",
    "separate_reductions": ".separate_groups",
    "without_all_gather": ".without",
    "without_reduction": ".without",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_FIRST_USE[name], __name__), name)
