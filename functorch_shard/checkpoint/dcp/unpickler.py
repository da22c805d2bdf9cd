"""Reads pickles from untrusted sources into inert objects: no name in a pickle is imported or called."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Any

import torch

from ...errors import shown

DTYPES = {f"torch.{name}": x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET", "DUP")
# Objects registered with copyreg are made without find_class.
_REFUSED = ("EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER")
_EXPANSION = 100  # elements of repeated tuples for each byte of a pickle
# How many objects an opcode takes off the stack, whether it also takes those above the last mark, how many it puts.
_EFFECTS = {
    op.name: (op.stack_before.index(mark), True, len(op.stack_after))
    if (mark := pickletools.markobject) in op.stack_before
    else (len(op.stack_before), False, len(op.stack_after))
    for op in pickletools.opcodes
}


class NotPlainError(Exception):
    """A pickle contains something other than tensors and plain values."""


class InertObject:
    """An object named in a pickle: its class name, arguments and state, without behaviour.

    Each load makes one subclass for each name. A pickle may set attributes of every object that it names, classes
    included: ``__setstate__`` receives them, and for a class it fails, because it needs an instance.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> InertObject:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read(raw: bytes, admitted: Container[str], persistent: Callable[[Any], Any]) -> Any:
    """Unpickle ``raw`` into built-in values, :class:`InertObject` instances and subclasses of it.

    Args:
        raw: the pickle.
        admitted: the names that it may contain, for example ``"torch.Size"``.
        persistent: returns the object for a persistent id.

    Raises:
        NotPlainError: a name that is not admitted.
        Exception: any other, where ``raw`` is not a pickle.
    """
    _check(raw)
    return _Unpickler(raw, admitted, persistent).load()


def is_class(x: Any) -> bool:
    """Whether ``x`` is a name in the pickle itself, for example a dtype, and not a call of it."""
    return isinstance(x, type) and issubclass(x, InertObject)


def _check(raw: bytes) -> None:
    """Refuse lengths larger than the pickle, and tuples that take far longer to hash than to read.

    The unpickler allocates what an opcode announces, and hashes a tuple that is a key element by element. A tuple that
    contains one tuple twice, which contains one twice, and so on, has exponentially many elements. So the elements of
    each tuple are counted, on a stack like the unpickler's, and charged where an opcode repeats one.
    """
    stack: list[int] = []  # number of elements of each tuple, 1 for other objects
    marks: list[int] = []
    memo: dict[int, int] = {}
    repeated = 0
    for opcode, arg, _ in pickletools.genops(raw):
        name = opcode.name
        if name in _PUTS:
            if (arg or 0) > len(raw):
                raise pickle.UnpicklingError(f"{name} {arg:,} in {len(raw):,} bytes")
            memo[len(memo) if arg is None else arg] = stack[-1]
        elif name in _GETS:
            stack.append(stack[-1] if arg is None else memo[arg])
            repeated += stack[-1]
            if repeated > _EXPANSION * len(raw):
                raise pickle.UnpicklingError("tuples in tuples, with far more elements than the pickle has bytes")
        elif name in _REFUSED or (name == "FRAME" and (arg or 0) > len(raw)):
            raise pickle.UnpicklingError(f"{name}, which no checkpoint needs, or of {arg} in {len(raw):,} bytes")
        elif name == "MARK" or (name == "POP" and marks and marks[-1] == len(stack)):
            marks.append(len(stack)) if name == "MARK" else marks.pop()
        else:
            below, to_mark, puts = _EFFECTS[name]
            start = (marks.pop() if to_mark else len(stack)) - below
            if start < 0:
                raise pickle.UnpicklingError("an empty stack")
            made = 1 + sum(stack[start:]) if name.startswith("TUPLE") else 1
            stack[start:] = [made] * puts


class _Unpickler(pickle.Unpickler):
    def __init__(self, raw: bytes, admitted: Container[str], persistent: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(raw))
        self._admitted, self._persistent = admitted, persistent
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"  # Python 2's name, in protocol 2
        if full not in self._admitted:
            raise NotPlainError(shown(f"it names {full}"))
        if full == "collections.OrderedDict":  # the unpickler fills it item by item
            return self._classes.setdefault(full, type("OrderedDict", (OrderedDict,), {"__init__": lambda self: None}))
        return self._classes.setdefault(full, type("InertObject", (InertObject,), {"name": full}))

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)
