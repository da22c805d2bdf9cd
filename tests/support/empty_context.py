"""Run every backward of the library as a thread of a device does: with no context variable set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from functools import wraps
from typing import Any
from unittest.mock import patch

from torch.autograd import Function

import functorch_shard as fs
from tests.laws.nestings import Column, Row, on_mesh


def functions() -> list[type[Function]]:
    """The autograd Functions of the library."""
    found, waiting = [], [Function]
    while waiting:
        for cls in waiting.pop().__subclasses__():
            waiting.append(cls)
            if cls.__module__.startswith(fs.__name__) and "backward" in vars(cls):
                found.append(cls)
    return found


@contextmanager
def in_empty_contexts() -> Iterator[list[str]]:
    """A context in which every backward of :func:`functions` runs in a new context; yields the names of those that did.

    Autograd runs nodes of a device in threads of its own, to which it carries modes and the levels of ``torch.func``,
    and no context variables.
    """
    ran: list[str] = []

    def alone(cls: type[Function]) -> Any:
        backward = cls.backward

        @wraps(backward)
        def in_thread(*args: Any) -> Any:
            ran.append(cls.__name__)
            return Context().run(backward, *args)

        return staticmethod(in_thread)

    with ExitStack() as stack:
        for cls in functions():
            stack.enter_context(patch.object(cls, "backward", alone(cls)))
        yield ran


def on_mesh_in_empty_contexts(mesh: fs.Mesh, column: Column, rows: list[Row]) -> list[Any]:
    """Return what each row gives, whole, or the text of its error."""
    with in_empty_contexts() as ran:
        results = on_mesh(mesh, column, rows)
    assert ran
    return results
