"""What backward does depends on nothing that the thread of the forward has, and autograd's threads of a device lack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from functools import wraps
from importlib import import_module
from pkgutil import walk_packages
from typing import Any
from unittest.mock import patch

import pytest
from torch import autograd

import functorch_shard as fs
from functorch_shard.torch_internals.autograd import Function
from tests.laws.nestings import COLUMNS, Column, Row, on_mesh, verdict


def functions() -> list[type[autograd.Function]]:
    """The autograd Functions of the library, those of features included."""
    for module in walk_packages(fs.__path__, f"{fs.__name__}."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    found, waiting = [], [autograd.Function]
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

    def alone(cls: type[autograd.Function]) -> Any:
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


ROWS: list[Row] = [
    ("grad", "the loss"),
    ("fs.grad", "the loss"),
    ("fs.grad", "fs.grad"),
    ("fs.grad", "grad"),
    ("fs.grad", "Hessian product"),
    ("jacrev", "fs.grad"),
    ("jvp", "fs.grad"),
]


def test_every_function_of_the_library_keeps_the_context_of_its_forward() -> None:
    assert len(functions()) > 10
    assert [cls for cls in functions() if not issubclass(cls, Function)] == []


@pytest.mark.parametrize(
    "column",
    [
        "simulated, 2 axes",
        "simulated, 1 axis, remat",
        "gloo, 1 axis, lazy, remat",
        "gloo, 2 axes, plain",
        "one after the other, 1 axis, remat",
    ],
)
def test_derivatives_are_right_when_every_backward_starts_without_context_variables(column: str) -> None:
    ranks = COLUMNS[column].ranks
    for results in ranks.run(on_mesh_in_empty_contexts, COLUMNS[column], ROWS):
        found = {row: verdict(result, ranks.size, row) for row, result in zip(ROWS, results, strict=True)}
        assert found == dict.fromkeys(ROWS, "right")
