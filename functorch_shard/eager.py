"""Functions that ``torch.compile`` runs as they are written: a compiled step breaks its graph where it calls one.

Traced by Dynamo, a collective's Function would be its forward alone, and its derivative a silent zero. ``fs.compile``
makes one graph of a step that communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Any, TypeVar, cast

import torch

Fn = TypeVar("Fn", bound=Callable[..., Any])


def eager(fn: Fn, *, recursive: bool = True) -> Fn:
    """Have ``torch.compile`` break its graph at each call of ``fn``; not ``recursive``: compile what ``fn`` calls."""
    disabled: list[Callable[..., Any]] = []

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and importing it takes seconds
            return fn(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(fn, recursive=recursive))
        return disabled[0](*args, **kwargs)

    return cast(Fn, call)


_ONE_AT_A_TIME = RLock()


@contextmanager
def without_compiling() -> Iterator[None]:
    """A context in which what ``torch.compile`` made runs as it was written, so that modes see each operator.

    The stance belongs to the process: of two threads in here at once, the one that ends last would leave the other's,
    and nothing would be compiled from then on.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet
        yield
        return
    with _ONE_AT_A_TIME, torch.compiler.set_stance("force_eager"):
        yield
