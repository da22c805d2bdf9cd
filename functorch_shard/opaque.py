"""Functions that ``torch.compile`` calls and does not trace through: Note [Opaque].

Note [Opaque]: Dynamo, which traces Python for ``torch.compile``, must not see a collective's Function: it would give
silent zeros under ``torch.func.jvp``. So it sees a function of this library, or a step under ``spmd``, as one call.
AOTAutograd then runs that call under the real transforms, and what it issues is recorded: Note [Recorded].

Such a call takes and returns tensors, numbers and dicts of them alone. Around it, in code that Dynamo does trace, trees
are described by those and made again: a layout, a mesh or an optimizer by its ``id``, on which Dynamo sets a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from .containers import OBJECTS, Static
from .torch_internals.dynamo import (
    in_opaque_call,
    is_of_dynamo,
    is_traced_otherwise,
    nonstrict,
    tensor_of_number,
    trace_in_place_of,
)
from .torch_internals.pytree import torch_pytree
from .torch_internals.transforms import being_traced

Fn = TypeVar("Fn", bound=Callable[..., Any])
_PLAIN = (int, float, bool, str, complex, torch.dtype, torch.device)
_WITH_LAYOUT: dict[str, Any] = {}


def has_layout(cls: type) -> None:
    """Have a mapping with a ``layout`` taken apart and made again around an opaque call."""
    _WITH_LAYOUT[cls.__name__] = cls


# Levels of torch.func at which a function that fs.grad differentiates is running: while Dynamo traces, and in calls.
DIFFERENTIATED: list[int] = []
_LEVELS: ContextVar[Sequence[int]] = ContextVar("levels of fs.grad around an opaque call", default=())


def traced_levels() -> Sequence[int]:
    """The levels at which ``fs.grad`` differentiates, as Dynamo traced it, around the opaque call that runs."""
    return _LEVELS.get()


@contextmanager
def _levels_set(levels: Sequence[int]) -> Iterator[None]:
    token = _LEVELS.set(levels)
    try:
        yield
    finally:
        _LEVELS.reset(token)


class Kept:
    """Layouts that opaque calls returned, as attributes: so that a compiled function can refer to them, for good."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number_of(self, x: Any) -> int:
        """The id of ``x``, or of the first that equals it, on the same mesh: layouts are often made again."""
        number = self._numbers.setdefault((x, getattr(x, "mesh", None)), id(x))
        if number == id(x):
            setattr(self, f"object_{number}", x)
        return number


_KEPT = Kept()


def opaque(fn: Fn, called: Callable[..., Any] | None = None) -> Fn:
    """Have Dynamo call ``called`` where a program calls ``fn``: ``fn`` itself by default. Return ``fn``.

    Only functions can be marked. Methods and other callables stay as they are.
    """
    if not isinstance(fn, FunctionType) or is_traced_otherwise(fn):
        return fn  # pyright: ignore[reportReturnType]
    run = called or fn

    def call(described: Any, levels: Sequence[int]) -> Any:
        with _levels_set(levels):
            return answer(described)

    def answer(described: Any) -> Any:
        if not being_traced():  # the backend "eager" runs it
            return _run(run, described)
        try:
            return in_opaque_call(lambda: _run(run, torch_pytree.tree_map(_static, described)))
        except Exception as error:
            if is_of_dynamo(error):
                raise
            return {("error", f"{type(error).__name__}: {error}"): {}}

    def traced(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return fn(*args, **kwargs)
        held: dict[int, Any] = {}
        result = call(_described([args, kwargs], held), list(DIFFERENTIATED))
        if isinstance(result, dict) and _head(result)[0] == "error":
            raise NotImplementedError(f"torch.compile: {_head(result)[1]} {_INSTEAD}")
        return _made(result, held, _KEPT)

    nonstrict(call)
    trace_in_place_of(fn, traced)
    return fn  # pyright: ignore[reportReturnType]


def _run(fn: Callable[..., Any], described: Any) -> Any:
    args, kwargs = _made(described, OBJECTS, _KEPT)
    return _described(fn(*args, **kwargs), {}, _KEPT)


def _static(x: Any) -> Any:
    """``x`` with a shape of numbers: C++ composites read it. Another shape is compiled anew."""
    if isinstance(x, torch.SymFloat):
        return tensor_of_number(x)
    if not isinstance(x, Tensor) or not any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride())):
        return x
    return x.as_strided([int(n) for n in x.shape], [int(n) for n in x.stride()], int(x.storage_offset()))


def _described(x: Any, held: dict[int, Any], kept: Kept | None = None) -> Any:
    """``x`` as tensors and numbers in dicts and lists; ``held`` gets the objects that are described by their id."""
    if isinstance(x, Tensor):
        return x
    if x is None or isinstance(x, str) or (kept is not None and isinstance(x, _PLAIN)):
        return {("constant", x): {}}
    if isinstance(x, _PLAIN):
        return x
    if type(x).__name__ in _WITH_LAYOUT and isinstance(x, _WITH_LAYOUT[type(x).__name__]):
        inside = {key: _described(x[key], held, kept) for key in x}
        return {(type(x).__name__, _number_of(x.layout, held, kept)): inside}
    if isinstance(x, Static):
        return {("object", _number_of(x, held, kept)): {}}
    if isinstance(x, dict):
        return {key: _described(value, held, kept) for key, value in x.items()}
    if type(x) is tuple:
        return {("tuple", len(x)): [_described(value, held, kept) for value in x]}
    if type(x) is list:
        return [_described(value, held, kept) for value in x]
    raise TypeError(_CANNOT_PASS + type(x).__name__)


def _number_of(x: Any, held: dict[int, Any], kept: Kept | None) -> int:
    if kept is not None:
        return kept.number_of(x)
    held[id(x)] = x
    return id(x)


def _made(x: Any, held: Mapping[int, Any], kept: Kept) -> Any:
    """The inverse of :func:`_described`."""
    if isinstance(x, list):
        return [_made(value, held, kept) for value in x]
    if not isinstance(x, dict):
        return x
    kind, value = _head(x)
    if kind == "":
        return {key: _made(value, held, kept) for key, value in x.items()}
    inside = x[(kind, value)]
    if kind == "constant":
        return value
    if kind == "tuple":
        return tuple([_made(each, held, kept) for each in inside])
    found = held[value] if value in held else getattr(kept, f"object_{value}")
    if kind == "object":
        return found
    return _WITH_LAYOUT[kind]({key: _made(each, held, kept) for key, each in inside.items()}, found)


def _head(x: Mapping[Any, Any]) -> tuple[str, Any]:
    for key in x:
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str):
            return key
        return "", None
    return "", None


_INSTEAD = "Decorate the step with @mesh.spmd, so that it is called as a whole, or use fs.compile."
_CANNOT_PASS = (
    "torch.compile: what is called as a whole takes and returns tensors, numbers, strings, lists, tuples and dicts, "
    f"Sharded and Full, meshes, layouts and optimizers. {_INSTEAD} This is a "
)


def refuse_dynamo() -> None:
    """Raise in code that Dynamo reads: the derivative of what is communicated would silently be zero."""
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(f"torch.compile: this communicates, and Dynamo reads it. {_INSTEAD}")
