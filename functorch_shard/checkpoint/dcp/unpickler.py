"""Pickles of anybody, read into records: nothing that they name is called, and nothing that they reach is shared."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

from ...errors import shown

Accepts = Callable[[tuple[Any, ...]], bool]  # whether a name may be called with these arguments
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT", "FRAME")
# What is registered with copyreg would come without being asked for.
_REFUSED = ("EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER")


class NotPlainError(Exception):
    """A pickle names what is not needed for plain values, and what may do harm."""


class Made:
    """What a pickle makes of a name: the arguments and the state that it gave, and no behaviour.

    A class of its own for each name and load. A pickle may set attributes of all that it is handed, classes too:
    ``__setstate__`` is what it meets then, and of a class that cannot be called without an instance.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None
    accepts: Accepts

    def __new__(cls, *args: Any) -> Made:
        if not cls.accepts(args):
            raise NotPlainError(f"a call of {cls.name} that is none of a plain value")
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read(raw: bytes, admits: Callable[[str, str], Accepts | None], persistent: Callable[[Any], None]) -> Any:
    """What a pickle says, its objects as :class:`Made`.

    Args:
        raw: the pickle.
        admits: by module and name, which calls of it are accepted; None: the name itself is refused.
        persistent: is given what lies outside of the pickle.

    Raises:
        NotPlainError: a name that is not admitted, or a call.
        Exception: anything, of what is no pickle.
    """
    _check_lengths(raw)
    return _Unpickler(raw, admits, persistent).load()


def _check_lengths(raw: bytes) -> None:
    """The unpickler makes room for what it is told to expect: refuse what is more than all the bytes that there are."""
    for opcode, arg, _ in pickletools.genops(raw):
        name = opcode.name
        if name in _MEMO and (arg or 0) > len(raw):
            raise pickle.UnpicklingError(f"{name} {arg:,} in {len(raw):,} bytes")
        if name in _REFUSED:
            raise pickle.UnpicklingError(f"{name}, which no checkpoint needs")


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, raw: bytes, admits: Callable[[str, str], Accepts | None], persistent: Callable[[Any], None]
    ) -> None:
        super().__init__(io.BytesIO(raw))
        self._admits, self._persistent = admits, persistent
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._classes:
            self._classes[module, name] = self._class(module, name)
        return self._classes[module, name]

    def _class(self, module: str, name: str) -> type:
        accepts = self._admits(module, name)
        if accepts is None:
            raise NotPlainError(shown(f"it names {module}.{name}"))
        if (module, name) == ("collections", "OrderedDict"):
            return type("OrderedDict", (dict,), {"__init__": lambda self: None})  # of no arguments
        return type("Made", (Made,), {"name": f"{module}.{name}", "accepts": staticmethod(accepts)})

    def persistent_load(self, pid: Any) -> None:
        self._persistent(pid)
