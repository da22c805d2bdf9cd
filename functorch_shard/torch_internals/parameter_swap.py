"""Replace a module's own tensors by others: while it runs, and when a part of it is recomputed in backward.

Note [Recomputation]: ``torch.utils.checkpoint`` runs a part of a module again in backward, after ``functional_call``
has restored the module's own tensors. A swap installs the given tensors again: at the first use of a tensor inside a
checkpointed region it wraps the region's ``recompute_fn``, which torch calls in backward. So each region is recomputed
with the tensors of its forward, whatever the module was called with in between, and between forward and backward the
module has its own tensors. Nothing is kept longer than the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import hint, reject
from .checkpointing import checkpointed_regions, reentrant_checkpoint
from .process_settings import own_parametrizations
from .rnn import takes_own_weights
from .transforms import in_transform

NEEDS_REAL_RANKS = (
    "torch.utils.checkpoint cannot be used on simulated ranks or inside a transform of torch.func: it recomputes in "
    "backward, after these have ended. functorch_shard.remat(fn)(*args) can, in its place. Or run this on real ranks "
    "(init_mesh), or on those of simulated_mesh(..., kind='sequential'), with fs.grad or backward(), or disable "
    "checkpointing, for example with model.gradient_checkpointing_disable()."
)
NOT_REENTRANT = (
    "torch.utils.checkpoint with use_reentrant=True supports neither fs.grad nor the tensors of this call. Pass "
    "use_reentrant=False; in transformers: "
    'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}).'
)


class Swap:
    """Replaces tensors of ``model`` by ``given``, by name. The model's own tensors are never written to.

    ``keep``: whether assignments of the model to tensors that were not given persist, as with functional_call.
    """

    def __init__(self, verb: str, model: nn.Module, given: Mapping[str, Tensor], *, keep: bool) -> None:
        self._verb, self._model, self._keep, self._lock = verb, model, keep, RLock()
        chosen = _by_identity(verb, model, given)
        self._requires_grad = any(x.requires_grad for x in chosen.values())
        places = (_Place(m, kind, chosen) for m in model.modules() for kind in ("_parameters", "_buffers"))
        # with keep, assignments to an empty place go to the model directly
        self._places = [place for place in places if place.module.__dict__[place.kind] or not keep]
        self._rnns = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
        self._compiled = [compiled for m in model.modules() if (compiled := _compiled_call(m, self._places))]

    @contextmanager
    def running(self, again: Again | None = None) -> Iterator[None]:
        """A context in which the model has the given tensors; ``again``: those of a region's forward."""
        with self._lock, own_parametrizations():
            self._refuse_threads()
            entry = _Entry(self, torch.is_grad_enabled(), checkpointed_regions())
            before: list[tuple[_Place | _CompiledCall, Any]] = []
            try:
                for place in (*self._places, *self._compiled):
                    before.append((place, place.install(entry, again)))  # noqa: PERF401  (each is restored, also after an error)
                yield
            finally:
                for place, own in before:
                    place.put_back(own, self._keep and again is None)
                for rnn in self._rnns:
                    takes_own_weights(rnn)

    def _refuse_threads(self) -> None:
        held = (place.module.__dict__[place.kind] for place in self._places)
        if any(isinstance(tensors, _Held) and tensors.thread != get_ident() for tensors in held):
            raise RuntimeError(
                f"{self._verb}: another thread is calling this model. Give each thread its own module: "
                "copy.deepcopy(model), which may be on the meta device."
            )

    def used(self, entry: _Entry) -> list[Again]:
        """Called before a tensor is used: wrap the recomputation of each region that this use is inside of."""
        if entry.with_grad and reentrant_checkpoint() is not None:
            raise RuntimeError(f"{self._verb}: {NOT_REENTRANT}")
        inside = [region for region in checkpointed_regions() if not any(region is x for x in entry.outside)]
        if inside and self._requires_grad and in_transform():
            raise NotImplementedError(f"{self._verb}: {NEEDS_REAL_RANKS}")
        for region in inside:
            if wrapper_of(region, self) is None:
                region.recompute_fn = Again(self, region.recompute_fn)
        return [again for region in inside if (again := wrapper_of(region, self))]


class Again:
    """Recomputes a region with the tensors of its forward. Writes to buffers go to copies."""

    def __init__(self, swap: Swap, recompute: Callable[..., None]) -> None:
        self.swap, self.recompute = swap, recompute
        self._seen: dict[tuple[_Place, str], Tensor] = {}

    def __call__(self, *args: Any) -> None:
        with self.swap.running(self):
            self.recompute(*args)

    def saw(self, place: _Place, name: str, x: Tensor) -> None:
        """Copy a buffer before the region writes to it: BatchNorm's writes do not increment versions."""
        if (place, name) not in self._seen:
            self._seen[place, name] = _copy(x)

    def buffers(self, place: _Place) -> dict[str, Tensor]:
        return {name: x.clone() for (other, name), x in self._seen.items() if other is place}


def wrapper_of(region: Any, swap: Swap | None = None) -> Again | None:
    """The wrapper of ``region``'s recomputation by ``swap`` (by any swap if None), if there is one."""
    recompute = region.recompute_fn
    while isinstance(recompute, Again) and swap is not None and recompute.swap is not swap:
        recompute = recompute.recompute
    return recompute if isinstance(recompute, Again) else None


@dataclass(frozen=True, eq=False)
class _Entry:
    """One use of a swap as a context."""

    swap: Swap
    with_grad: bool
    outside: Sequence[Any]  # the regions around the call itself: they repeat the whole call


class _Place:
    """The parameters or the buffers of one module, and which of them are given."""

    def __init__(self, module: nn.Module, kind: str, chosen: Mapping[int, Tensor]) -> None:
        self.module, self.kind = module, kind
        own = module.__dict__[kind]
        self.given = {name: chosen[id(x)] for name, x in own.items() if id(x) in chosen}
        self.watched = True

    def install(self, entry: _Entry, again: Again | None) -> Any:
        own = self.module.__dict__[self.kind]
        seen = again.buffers(self) if again and self.kind == "_buffers" else {}
        tensors = {**own, **self.given, **seen}
        self.module.__dict__[self.kind] = _Held(tensors, partial(self._use, entry)) if self.watched else tensors
        return own

    def _use(self, entry: _Entry, tensors: dict[str, Any], name: str) -> None:
        for again in entry.swap.used(entry):
            self.show(again, {name: dict.get(tensors, name)})

    def show(self, again: Again, tensors: Mapping[str, Tensor | None]) -> None:
        for name, x in tensors.items():
            if self.kind == "_buffers" and x is not None:
                again.saw(self, name, x)

    def put_back(self, own: dict[str, Any], keep: bool) -> None:
        held = self.module.__dict__[self.kind]
        self.module.__dict__[self.kind] = own
        after = {**dict.copy(held), **{name: own[name] for name in self.given if name in own}}
        if keep and (list(after) != list(own) or any(after[name] is not x for name, x in own.items())):
            own.clear()
            own.update(after)


class _CompiledCall:
    """A compiled module, whose call reads tensors without ``__getitem__``: a call counts as a use of all of them."""

    def __init__(self, module: nn.Module, name: str, inside: Sequence[_Place]) -> None:
        self.module, self.kind, self.inside = module, name, inside
        for place in inside:
            place.watched = False

    def install(self, entry: _Entry, _: Again | None) -> Any:
        call = self.module.__dict__[self.kind]

        @wraps(call)
        def used(*args: Any, **kwargs: Any) -> Any:
            for again in entry.swap.used(entry):
                for place in self.inside:
                    place.show(again, place.module.__dict__[place.kind])
            return call(*args, **kwargs)

        self.module.__dict__[self.kind] = used
        return call

    def put_back(self, own: Any, _: bool) -> None:
        self.module.__dict__[self.kind] = own


def compiled_call(module: nn.Module) -> str | None:
    """The attribute with the compiled call of ``torch.compile(module)`` or ``module.compile()``, if there is one."""
    name = "forward" if "_orig_mod" in module._modules else "_compiled_call_impl"
    return None if module.__dict__.get(name) is None else name


def _compiled_call(module: nn.Module, places: Sequence[_Place]) -> _CompiledCall | None:
    name = compiled_call(module)
    if name is None:
        return None
    modules = set(module.modules())
    return _CompiledCall(module, name, [place for place in places if place.module in modules])


class _Held(dict[str, Any]):
    """The dict of tensors of a module during a swap. It reports each use beforehand."""

    def __init__(self, tensors: Mapping[str, Any], use: Callable[[dict[str, Any], str], None]) -> None:
        super().__init__(tensors)
        self.thread, self._use = get_ident(), use

    def __getitem__(self, name: str) -> Any:
        self._use(self, name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  (this is get)

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.items()),)  # a module may be copied while it runs


def _copy(x: Tensor) -> Tensor:
    # which tensors the recomputation saves depends on requires_grad
    return x.detach().clone().requires_grad_(x.requires_grad)


def _by_identity(verb: str, model: nn.Module, given: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The given tensors by the id of the tensor that each replaces, under all of its names."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    problems = [f"{name!r}: not in the model{hint(name, list(own))}" for name in given if name not in own]
    chosen: dict[int, Tensor] = {}
    for name, x in given.items():
        if name in own and chosen.setdefault(id(own[name]), x) is not x:
            tied = next(other for other in given if own.get(other) is own[name])
            problems.append(f"{name!r}: tied to {tied!r} in the model, but given another tensor")
    reject(verb, problems, "Pass tensors by the names of the model's own parameters and buffers; tied ones once.")
    wrong = [f"{name!r}: got {type(x).__name__}" for name, x in given.items() if not isinstance(x, Tensor)]
    reject(verb, wrong, "Parameters and buffers are tensors.", TypeError)
    return chosen
