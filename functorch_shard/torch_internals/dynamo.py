"""What Dynamo, the tracer of ``torch.compile``, calls and does not read.

Dynamo would trace a collective's Function by its forward alone: under ``torch.func.jvp`` its tangent is silently zero.
As an opaque call it stands in Dynamo's graph as it is, and AOTAutograd runs it below the real transforms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from threading import RLock
from typing import Any, TypeVar
from weakref import finalize

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Parameter

from .tensors import arguments_of, as_number, identity_of_storage, is_written, tensors_of
from .tracing import ON_VALUES, RefusedError, refuse_random
from .transforms import Tracer

__all__ = [
    "in_opaque_call",
    "is_of_dynamo",
    "is_traced_otherwise",
    "nonstrict",
    "tensor_of_number",
    "trace_in_place_of",
    "without_compiling",
]
T = TypeVar("T")
_RULES = "torch._dynamo.trace_rules"
_OPAQUE = ("_allowed_callable_ids", "_nonstrict_trace_callable_ids")
_REPLACED = ("_polyfilled_function_ids",)
_MARKED: dict[int, Sequence[str]] = {}  # ids of functions, and Dynamo's sets that they belong to

_ONE_AT_A_TIME = RLock()


@contextmanager
def without_compiling() -> Iterator[None]:
    """A context in which what ``torch.compile`` made runs as it was written, so that modes see each operator.

    The stance belongs to the process: of two threads in here at once, the one that ends last would leave the other's,
    and nothing would be compiled from then on.
    """
    with _ONE_AT_A_TIME, torch.compiler.set_stance("force_eager"):
        yield


def nonstrict(fn: Callable[..., Any]) -> None:
    """Do what ``torch._dynamo.nonstrict_trace`` does, with ``fn`` itself, and without importing Dynamo."""
    _mark(fn, _OPAQUE)


def trace_in_place_of(fn: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Have Dynamo trace ``other`` where a compiled function calls ``fn``, and where ``fn`` itself is compiled."""
    other.__code__ = other.__code__.replace()  # Dynamo keeps what it compiled by the code object
    fn.__dict__.update(
        __torch_dynamo_polyfill__=other, _torchdynamo_orig_callable=other, _torchdynamo_wrapper_id=id(fn)
    )
    _mark(fn, _REPLACED)


def is_traced_otherwise(fn: Callable[..., Any]) -> bool:
    """Whether :func:`trace_in_place_of` was called for ``fn``, and not for one that it wraps."""
    return id(fn) in _MARKED and fn.__dict__.get("_torchdynamo_wrapper_id") == id(fn)


def _mark(fn: Callable[..., Any], names: Sequence[str]) -> None:
    _MARKED[id(fn)] = names
    finalize(fn, _forget, id(fn)).atexit = False  # another object may get its id
    _tell_dynamo(id(fn))


def _tell_dynamo(*numbers: int) -> None:
    if rules := sys.modules.get(_RULES):
        for number in numbers:
            for name in _MARKED[number]:
                getattr(rules, name).add(number)


def _forget(number: int) -> None:
    names, rules = _MARKED.pop(number, ()), sys.modules.get(_RULES)
    for name in names:
        if hasattr(rules, name):  # not while it is imported, which is when memory is collected too
            getattr(rules, name).remove(number)


class _OnImport(MetaPathFinder):
    """Tells Dynamo what was marked before it was imported, which takes two seconds."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_tell(module: Any) -> None:
                execute(module)
                _tell_dynamo(*_MARKED)

            spec.loader.exec_module = execute_and_tell
        return spec


if _RULES not in sys.modules:
    sys.meta_path.insert(0, _OnImport())


def is_of_dynamo(error: Exception) -> bool:
    """Whether Dynamo controls itself by this exception."""
    return type(error).__module__ == "torch._dynamo.exc"


def tensor_of_number(x: torch.SymFloat) -> Tensor:
    """A float of the caller's program, which may be another one in each call."""
    number: Any = x
    made: Any = as_number(torch.scalar_tensor(number, dtype=torch.float64))
    made.symbol = x
    return made


def in_opaque_call(fn: Callable[[], T]) -> T:
    """``fn()`` as it is traced; where an active fake mode mixes devices (jvp of grad under vmap), without that mode."""
    try:
        with no_python_dispatcher(), _Refusing():
            return fn()
    except RuntimeError as error:
        if "found at least two devices" not in str(error):
            raise
    with unset_fake_temporarily(), no_python_dispatcher(), _Refusing():
        return fn()


class _Refusing(Tracer):
    """Raises for operators that would be silently lost or different where a compiled graph runs."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Tensor] = {}  # memory of real tensors, such as a range, that was allocated here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, Parameter, FakeTensor, FunctionalTensor) for kind in types):
            return NotImplemented  # a subclass: what it does below is seen one by one
        refuse_random(func, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            if not hasattr(args[0], "symbol"):
                raise RefusedError(ON_VALUES)
            return args[0].symbol
        for argument, x in zip(arguments_of(func), args, strict=False):
            if is_written(argument) and _is_real(x) and identity_of_storage(x) not in self._made:
                raise RefusedError(_WRITTEN)
        result = func(*args, **(kwargs or {}))
        given = {identity_of_storage(x) for x in args if _is_real(x)}
        for x in filter(_is_real, tensors_of(result)):
            if identity_of_storage(x) not in given:
                self._made[identity_of_storage(x)] = x
        return result


def _is_real(x: Any) -> bool:
    return type(x) in (Tensor, Parameter)


_WRITTEN = (
    "A tensor that is not an argument is written to, such as the buffers of a BatchNorm: pass it and return it "
    "(fs.apply), or use fs.compile, which writes to it at each call."
)
