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
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT", "FRAME")
# Objects registered with copyreg are made without find_class.
_REFUSED = ("EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER")


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
    _check_lengths(raw)
    return _Unpickler(raw, admitted, persistent).load()


def is_class(x: Any) -> bool:
    """Whether ``x`` is a name in the pickle itself, for example a dtype, and not a call of it."""
    return isinstance(x, type) and issubclass(x, InertObject)


def _check_lengths(raw: bytes) -> None:
    """Refuse lengths larger than the pickle: the unpickler allocates what an opcode announces."""
    for opcode, arg, _ in pickletools.genops(raw):
        name = opcode.name
        if name in _MEMO and (arg or 0) > len(raw):
            raise pickle.UnpicklingError(f"{name} {arg:,} in {len(raw):,} bytes")
        if name in _REFUSED:
            raise pickle.UnpicklingError(f"{name}, which no checkpoint needs")


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
