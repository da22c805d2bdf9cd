"""The results of operators that a function run again has from its first run: ``remat(policy=...)``.

Note [Saved results]: a function is run again inside of other transforms than at first, which put the operators of
tangents between its own. So a saved result is not found by its place in a sequence, as torch's selective checkpointing
finds it, but by what it was computed from, Note [Identities]. What is not found is computed: a policy may cost time and
memory, and does not change a value.

What is computed from gathered parameters and nothing else is not saved: it would be a whole parameter. Nor are random
numbers, which are drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from ..communication.collective import RECORD, Collective, Send, issued_by
from ..communication.work import Work
from ..sharding.lazy_tensor import Lazy
from ..torch_internals.operators import (
    has_tensors,
    is_plain,
    makes_like,
    may_draw,
    plain_tensors,
    returns_fresh,
    written_by,
)
from ..torch_internals.pytree import torch_pytree
from ..torch_internals.tensors import (
    TorchDispatchMode,
    detached,
    identity_of_storage,
    tensors_of,
    version_of,
)
from ..torch_internals.transforms import being_traced, without_batches
from .identities import Identities, Known, addresses
from .save_policy import Saves

_NO_RESULTS = {torch.ops.aten.detach.default, RECORD}


@dataclass(frozen=True, eq=False)
class Saved:
    """What the first run saved: ``tensors``, by the identity of the call they are results of."""

    calls: Mapping[int, _Call]
    identities: Known
    random: bool

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in order. Once autograd has saved them, keep :meth:`known` alone, which holds none."""
        return [x for call in self.calls.values() for x in call.leaves if isinstance(x, Tensor)]

    def known(self) -> Saved:
        """This without the tensors, which are passed to :meth:`reused`."""
        numbers = count()
        calls = {identity: call.known(numbers) for identity, call in self.calls.items()}
        return Saved(calls, self.identities, self.random)

    @contextmanager
    def reused(self, inputs: Sequence[Tensor], saved: Sequence[Tensor]) -> Iterator[None]:
        """A context in which the function runs again; ``saved`` are the ``tensors``, as autograd kept them."""
        if not self.calls:
            yield
            return
        with _Run(inputs, self.random, self, [without_batches(x) for x in saved]) as run, issued_by(run.issue):
            yield


NOTHING = Saved({}, Known(), True)


@contextmanager
def saving(saves: Saves | None, inputs: Sequence[Tensor], random: bool) -> Iterator[Callable[[], Saved]]:
    """A context in which the function runs for the first time; the function it gives is called after it."""
    if saves is None or being_traced():
        yield lambda: NOTHING
        return
    with _Saving(saves, inputs, random) as run, issued_by(run.issue):
        yield run.saved


@dataclass(slots=True)
class _Call:
    """The results of a call as leaves of a tree, with a :class:`_Place` for a tensor that is elsewhere."""

    leaves: list[Any]
    form: Any
    written: bool = False  # whether the function writes to a result

    def known(self, numbers: Iterator[int]) -> _Call:
        places = [_Place.of(x, next(numbers)) if isinstance(x, Tensor) else x for x in self.leaves]
        return _Call(places, self.form, self.written)

    def results(self, saved: Sequence[Tensor]) -> Any:
        """Views of what was saved, or copies."""
        leaves = [x.of_saved(saved, self.written) if isinstance(x, _Place) else x for x in self.leaves]
        return torch_pytree.tree_unflatten(leaves, self.form)


@dataclass(frozen=True, slots=True)
class _Place:
    """Which of the saved tensors it is, and its memory and version then."""

    number: int
    memory: StorageWeakRef
    version: int

    @staticmethod
    def of(x: Tensor, number: int) -> _Place:
        return _Place(number, StorageWeakRef(x.untyped_storage()), version_of(x))

    def of_saved(self, saved: Sequence[Tensor], copy: bool) -> Tensor:
        x = saved[self.number]
        if identity_of_storage(x) == self.memory.cdata and version_of(x) != self.version:
            raise RuntimeError(
                "remat: a result that the policy saved was written to in place after the function returned it. Write "
                "to a copy of what it returns, or have the policy recompute the last operator."
            )
        return x.clone() if copy else x.detach()


class _Run(TorchDispatchMode):
    """The function is run again: what was saved is returned, the rest computed."""

    def __init__(
        self, inputs: Sequence[Tensor], random: bool, before: Saved = NOTHING, saved: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self._identities = Identities(inputs, random, before.identities)
        self._calls, self._saved = before.calls, saved
        self._steps_aside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._steps_aside or func in _NO_RESULTS:
            return func(*args, **kwargs)
        if any(kind not in (Tensor, Parameter, Lazy) for kind in types):
            return self._not_seen(func, args, kwargs)
        known, written = addresses(args, kwargs), written_by(func, args, kwargs)
        key, whole = self._identities.key(func, args, kwargs), self._identities.is_whole(args, kwargs)
        call = self._calls.get(self._identities.of(key))
        result = self._computed(key, func, args, kwargs, whole) if call is None else call.results(self._saved)
        for i, x in enumerate(written):
            self._identities.register(x, (key, "written", i), whole)
        for i, x in enumerate(tensors_of(result)):
            if is_plain(x) and identity_of_storage(x) not in known:
                self._identities.register(x, (key, i), whole)
        return result

    def _computed(self, key: Hashable, func: Any, args: Any, kwargs: Any, whole: bool) -> Any:
        return func(*args, **kwargs)

    def _not_seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Of tensors of a subclass: what it does with those that it is made of is not seen here."""
        written = written_by(func, args, kwargs)
        self._copy_before_writes({identity_of_storage(x) for x in written})
        result = func(*args, **kwargs)
        for x in written:
            self._identities.register(x, object())
        return result

    def _copy_before_writes(self, written: set[int]) -> None:
        """Nothing: results that are written to are copies already."""

    def issue(self, op: Collective, x: Tensor, send: Send) -> Work:
        """Send ``x``; what operators do on the way, to memory that others write to, is not the function's."""
        is_gather = bool(op.key) and op.kind == "all_gather"
        operand = without_batches(x)  # of another axis
        key = self._identities.gather_key(op, operand) if is_gather else object()
        with self._aside():
            work = send(op, x)

        def wait() -> Tensor:
            with self._aside():
                result = work.wait()
            plain = without_batches(result)
            if is_plain(plain) and is_gather:
                self._identities.gathered(plain, key, operand)
            elif is_plain(plain):
                self._identities.register(plain, key)
            return result

        return Work(wait)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._steps_aside += 1
        try:
            yield
        finally:
            self._steps_aside -= 1


class _Saving(_Run):
    """The function is run for the first time."""

    def __init__(self, saves: Saves, inputs: Sequence[Tensor], random: bool) -> None:
        super().__init__(inputs, random)
        self._saves, self._random, self._results = saves, random, dict[int, _Call]()
        self._made = dict[int, _Call]()  # by the address of a result of it: the same call made again has others

    def saved(self) -> Saved:
        """What is there after the run."""
        return Saved(self._results, self._identities.known(), self._random)

    def _computed(self, key: Hashable, func: Any, args: Any, kwargs: Any, whole: bool) -> Any:
        written, known = {identity_of_storage(x) for x in written_by(func, args, kwargs)}, addresses(args, kwargs)
        self._copy_before_writes(written)
        before = _generators(func, args, kwargs)
        result = func(*args, **kwargs)
        drew = any(not torch.equal(a, b) for a, b in zip(before, _generators(func, args, kwargs), strict=True))
        never = written or drew or whole or makes_like(func) or not has_tensors(args, kwargs)
        if not never and returns_fresh(result, known) and self._saves(result, func, args, kwargs):
            call = self._results.setdefault(self._identities.of(key), _kept(result))
            self._made.update((identity_of_storage(x), call) for x in plain_tensors(result))
        return result

    def _copy_before_writes(self, written: set[int]) -> None:
        """What was saved stays as it is: the function writes to memory that is its own."""
        for call in [self._made[address] for address in written if address in self._made]:
            call.written = True
            if any(isinstance(x, Tensor) and identity_of_storage(x) in written for x in call.leaves):
                call.leaves = [x.clone() if isinstance(x, Tensor) else x for x in call.leaves]


def _kept(result: Any) -> _Call:
    leaves, form = torch_pytree.tree_flatten(result)
    return _Call([detached(x) if isinstance(x, Tensor) else x for x in leaves], form)


def _generators(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The states of the generators that ``func`` may draw from."""
    if not may_draw(func):
        return []
    devices = sorted({x.device for x in plain_tensors(args) if x.device.type not in ("cpu", "meta")}, key=str)
    own = [x.get_state() for x in kwargs.values() if isinstance(x, torch.Generator)]
    return [*own, torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in devices)]
