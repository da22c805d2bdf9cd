"""Tensors on the meta device that have memory for a while, from their first use on; which tensors are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..torch_internals.autograd import TorchDispatchMode
from ..torch_internals.tensors import identity_of_storage, is_written, schema_of, tensors_of

_WHERE: tuple[Any, ...] = (Tensor.is_meta, Tensor.is_cpu, Tensor.is_cuda, Tensor.device)
_GETTERS = tuple(each.__get__ for each in _WHERE)


class Staging(TorchDispatchMode):
    """While it is entered, a tensor on the meta device ``inside`` has memory from its first use on.

    So a function may fill tensors that it finds there, through ``.data`` and views too, and draws the random numbers
    that it draws for tensors with values. Of elements that it does not write nothing is known.

    Args:
        names: the names of tensors by their storage: those on the meta device, and others that are not to be changed.
        own: the names of tensors with values, which may be written to.
        inside: whether a name may have memory here. Writes to all others are noted in ``others``.
        unit_of: of a name. Tensors of one unit have memory at a time.
        start: makes the memory of a name.
        finish: gets a name and its memory, if that was written to, when a tensor of another unit is used, and at the
            end.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        own: Mapping[int, str],
        inside: Callable[[str], bool],
        unit_of: Callable[[str], str],
        start: Callable[[str], Tensor],
        finish: Callable[[str, Tensor], None],
    ) -> None:
        super().__init__()
        self._names, self._own, self._inside, self._unit_of = names, own, inside, unit_of
        self._start, self._finish = start, finish
        self._memory: dict[str, Tensor] = {}
        self.written: set[str] = set()
        self.others: dict[str, None] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self, _Getters(self.in_memory):
            yield
        self._leave_unit()

    def in_memory(self, x: Any) -> Any:
        """``x``, or the same elements in the memory that its tensor has here."""
        name = self._names.get(identity_of_storage(x)) if isinstance(x, Tensor) and x.is_meta else None
        if name is None or not self._inside(name):
            return x
        if name not in self._memory:
            self._allocate(name)
        memory = self._memory[name].untyped_storage()
        view = torch.empty(0, dtype=x.dtype, device=memory.device)
        return view.set_(memory, x.storage_offset(), x.shape, x.stride())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        originals: dict[int, Tensor] = {}

        def moved(x: Any) -> Any:
            there = self.in_memory(x)
            originals[id(there)] = x
            return there

        call: Any = (args, kwargs or {})
        args, kwargs = optree.tree_map(moved, call, none_is_leaf=True)
        self._note_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        return optree.tree_map(lambda x: originals.get(id(x), x), result, none_is_leaf=True)  # where it works in place

    def _note_writes(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        declared = schema_of(func).arguments
        given = {**dict(zip([x.name for x in declared], args, strict=False)), **kwargs}
        for x in (x for one in declared if is_written(one) for x in tensors_of(given.get(one.name))):
            storage = identity_of_storage(x)
            mine = {**self._own, **{identity_of_storage(there): name for name, there in self._memory.items()}}
            if storage in mine:
                self.written.add(mine[storage])
            elif storage in self._names:
                self.others[self._names[storage]] = None

    def _allocate(self, name: str) -> None:
        if any(self._unit_of(other) != self._unit_of(name) for other in self._memory):
            self._leave_unit()
        self._memory[name] = self._start(name)

    def _leave_unit(self) -> None:
        for name, x in self._memory.items():
            if name in self.written:
                self._finish(name, x)
        self.written.difference_update(self._memory)
        self._memory = {}


class _Getters(TorchFunctionMode):
    """Answers where a tensor is by where it is after ``in_memory``: some functions leave alone what is on meta."""

    def __init__(self, in_memory: Callable[[Any], Any]) -> None:
        super().__init__()
        self._in_memory = in_memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GETTERS:
            args = (self._in_memory(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))
