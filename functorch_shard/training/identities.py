"""What the values of a program were computed from: an identity for each, that another run of the program finds again.

Note [Identities]: the identity of a value is made of the operator and of the identities of its operands, down to the
inputs. Two values of one identity are equal, whatever ran between them, and a tangent does not have that of a primal.
Operators are seen below all transforms, where tensors are plain ones with their batch dims. Identities belong to
storages, and views need none of their own.

A random result, and a constant, have that of their place among the same calls. So has a gather: of what this rank
passes the same of twice, others may pass other shards. One that never occurs again have:
uninitialized memory, what an unknown object went into, and what a collective returns that is not a gather of
parameters, as it depends on what other ranks pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..sharding.lazy_tensor import Lazy, provenance_of
from ..torch_internals.operators import (
    draws,
    has_tensors,
    is_plain,
    makes_like,
    may_draw,
    name_of,
    plain_tensors,
)
from ..torch_internals.pytree import torch_pytree
from ..torch_internals.tensors import identity_of_storage, is_on_cpu, version_of
from ..torch_internals.transforms import without_batches

_UNINITIALIZED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_")
# Whatever was in the operand before does not matter.
_OVERWRITING = ("bernoulli_", "uniform_", "normal_", "random_", "exponential_", "zero_", "fill_", "copy_")
_SMALL = 1024  # bytes of a constant that is known by its values


@dataclass(slots=True)
class Storage:
    """The identity of a storage, whose address stays reserved as long as this refers to it."""

    reference: StorageWeakRef
    identity: int
    version: int | None = None  # of one that neither went in nor was made here
    whole: bool = False  # whether it was computed from gathered parameters alone


@dataclass(frozen=True, eq=False)
class Known:
    """The identities of an earlier run."""

    identities: Mapping[Hashable, int] = field(default_factory=dict)
    others: Mapping[int, Storage] = field(default_factory=dict)  # what it used beside its inputs, by address


class Identities:
    """The identities of one run, on ``inputs``.

    ``random``: whether random numbers are those of the earlier run.
    """

    def __init__(self, inputs: Sequence[Tensor], random: bool, earlier: Known) -> None:
        self._random, self._earlier = random, earlier.identities
        self._own: dict[Hashable, int] = {}
        self._others: dict[int, Storage] = {}
        self._storages: dict[int, Storage] = dict(earlier.others)
        self._times: Counter[Hashable] = Counter()
        self._gathers: WeakKeyDictionary[Any, dict[Hashable, int]] = WeakKeyDictionary()
        for i, x in enumerate(inputs):
            plain = without_batches(x)
            if is_plain(plain) and identity_of_storage(plain) not in self._storages:
                self.register(plain, ("input", i))

    def known(self) -> Known:
        """For a later run."""
        return Known(self._own, self._others)

    def of(self, key: Hashable) -> int:
        """The identity of what has ``key``: that of the earlier run, or a new one."""
        found = self._earlier.get(key)
        return self._own.setdefault(key, len(self._earlier) + len(self._own)) if found is None else found

    def register(self, x: Tensor, key: Hashable, whole: bool = False, version: int | None = None) -> Storage:
        """Note that the memory of ``x`` has the value with ``key`` from now on.

        Laid out as ``x`` is: hooks of saved tensors may keep it without its offset and strides.
        """
        storage = Storage(StorageWeakRef(x.untyped_storage()), self.of((key, _layout(x))), version, whole)
        self._storages[identity_of_storage(x)] = storage
        return storage

    def gathered(self, x: Tensor, key: Hashable, operand: Tensor) -> None:
        """Note that ``x`` was gathered from the shards of all ranks, of which this rank's is ``operand``."""
        if identity_of_storage(x) == identity_of_storage(operand):
            self._storage(x).whole = True
        else:
            self.register(x, key, whole=True)

    def key(self, op: Any, args: Any, kwargs: Any) -> Hashable:
        """Of a call of an operator; two calls of one key have equal results."""
        name = name_of(op)
        if name in _UNINITIALIZED or (draws(op) and not self._random):
            return object()
        by_form = makes_like(op) or (name in _OVERWRITING and _is_all_memory(args[0]))
        first = _form(args[0]) if by_form else self.described(args[:1])
        key = op, first, self.described(args[1:]), self.described(kwargs)
        if may_draw(op) or makes_like(op) or not has_tensors(args, kwargs):
            self._times[key] += 1
            return *key, self._times[key]
        return key

    def described(self, x: Any) -> Hashable:
        """``x`` as an argument, so that two of one description are equal."""
        if isinstance(x, Lazy):
            gather, shard, *rest = provenance_of(x)
            described = self.described(shard), *rest
            return "lazy", *described, self._number(gather, described[:2])
        if is_plain(x):
            return self._storage(x).identity, *_layout(x)
        if isinstance(x, (list, tuple)):
            return tuple(map(self.described, x))
        if isinstance(x, dict):
            return tuple((name, self.described(y)) for name, y in x.items())
        if x is None or isinstance(x, (bool, int, float, complex, str)):
            return type(x), repr(x)
        if isinstance(x, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return x
        return object()

    def gather_key(self, op: Any, operand: Tensor) -> Hashable:
        """Of the result of ``op``, a gather of parameters, on this rank's ``operand``."""
        key = op, self.described(operand)
        self._times[key] += 1
        return *key, self._times[key]

    def _number(self, gather: Any, key: Hashable) -> int:
        """Which one ``gather`` is of those that gather what has ``key`` here, and may have other shards elsewhere."""
        numbers = self._gathers.setdefault(gather, {})
        if key not in numbers:
            self._times["lazy", key] += 1
            numbers[key] = self._times["lazy", key]
        return numbers[key]

    def is_whole(self, args: Any, kwargs: Any) -> bool:
        """Whether all tensors among the arguments were computed from gathered parameters alone."""
        given = [x for x in torch_pytree.tree_leaves([args, kwargs]) if isinstance(x, Tensor)]
        return bool(given) and all(isinstance(x, Lazy) or (is_plain(x) and self._storage(x).whole) for x in given)

    def _storage(self, x: Tensor) -> Storage:
        address = identity_of_storage(x)
        storage = self._storages.get(address)
        if storage is None and is_on_cpu(x) and x.untyped_storage().nbytes() <= _SMALL:
            return self.register(x, ("constant", bytes(x.untyped_storage().tolist())))
        if storage is None or storage.version not in (None, version_of(x)):
            self._others[address] = self.register(x, ("other", address, version_of(x)), version=version_of(x))
            return self._others[address]
        return storage


def addresses(args: Any, kwargs: Any) -> set[int]:
    """Of the memory of the plain tensors among the arguments of a call."""
    return {identity_of_storage(x) for x in plain_tensors([args, kwargs])}


def _layout(x: Tensor) -> tuple[Hashable, ...]:
    """Which elements of its memory ``x`` has, and what they stand for."""
    return x.storage_offset(), *x.shape, None, *x.stride(), x.dtype, x.is_conj(), x.is_neg()


def _form(x: Tensor) -> Hashable:
    return (*_layout(x), x.device) if is_plain(x) else object()


def _is_all_memory(x: Any) -> bool:
    return is_plain(x) and x.numel() * x.element_size() == x.untyped_storage().nbytes()
