"""What a process has for itself, and threads that take turns share: put away at the end of a turn, and back after it.

Note [Own state]: ranks in threads, one of which runs at a time, share the objects of one process. Some of them torch
changes for the duration of a call, and a turn may end inside of such a call, at a collective:

- ``functional_call`` and :class:`Swap` replace the tensors of a module. All that the module and those inside of it have
  as attributes is replaced by what they had before the call, and by what they had at the end of the turn when the
  next turn of this rank begins. So no rank sees the tensors of another one.
- modules are put into evaluation mode, or have hooks, for some of their calls: module_changes.py
- the random number generators: each rank has a state of its own
- settings of the process that programs change for a while: Note [Process settings] in process_settings.py
- ``torch.func.jvp`` and tracers have globals of their modules, and tracers replace methods of ``nn.Module``:
  Note [While it runs] in while_it_runs.py.
- forward mode has one level for all threads, at whose end every tangent is lost: it ends with its last user.

torch has no other place to see these, so while ranks run, ``functional_call``, tracers and the ends of a level call
functions of this file, which do nothing in threads that do not take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.nn.utils import stateless

from .called_module import CalledModule
from .module_changes import ModuleChanges
from .process_settings import ProcessSettings
from .while_it_runs import Globals, Replaced

_OWN: ContextVar[OwnState | None] = ContextVar("what the rank of this thread has for itself", default=None)


def own_state() -> OwnState | None:
    """That of the rank which this thread runs; ``None`` in threads that do not take turns."""
    return _OWN.get()


class OwnState:
    """What one rank has for itself.

    Args:
        number: which rank this is; it is part of what a recorded function depends on.
        generators: the generators of the process that each rank has for itself.
        states: of these, when the first turn of this rank begins.
        alone: whether there is no other rank.
    """

    def __init__(
        self, number: int, generators: Sequence[torch.Generator], states: Sequence[Tensor], alone: bool
    ) -> None:
        self.number, self.generators, self.states, self.alone = number, generators, states, alone
        self.called: list[CalledModule] = []  # outermost first
        self.tracers = Replaced()
        self.settings, self.changes = ProcessSettings(), ModuleChanges()
        self._globals = Globals()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for all turns of this rank; a turn begins and ends with it."""
        token = _OWN.set(self)
        self.begin_turn()
        try:
            yield
        finally:
            self.end_turn()
            _OWN.reset(token)

    def begin_turn(self) -> None:
        for generator, state in zip(self.generators, self.states, strict=True):
            generator.set_state(state)
        self.settings.exchange()
        self._globals.exchange()
        self.changes.exchange()
        for module in self.called:
            module.put_back()
        self.tracers.put_back()

    def end_turn(self) -> None:
        self.tracers.put_away()
        for module in reversed(self.called):
            module.put_away()
        self.changes.exchange()
        self._globals.exchange()
        self.settings.exchange()
        self.states = [generator.get_state() for generator in self.generators]


@contextmanager
def called(verb: str, module: nn.Module, *, checked: bool = True) -> Iterator[None]:
    """A context around a call that replaces tensors of ``module``: on ranks that take turns, each has its own.

    ``checked``: raise if buffers were written to that were not given to the call.
    """
    own = _OWN.get()
    if own is None:
        yield
        return
    call = CalledModule(module)
    own.called.append(call)
    try:
        yield
    finally:
        own.called.remove(call)
    if checked and not own.alone:
        call.refuse_writes(verb, module)


class _Replacements:
    """Torch's functions that ranks have others for, while any take turns: Dynamo, for one, cannot read these."""

    def __init__(self) -> None:
        self._lock, self._runs = Lock(), 0
        self._own: list[tuple[Any, str, Any]] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._replace()
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                while self._own and not self._runs:
                    setattr(*self._own.pop())

    def _replace(self) -> None:
        for module, name, wrap in (
            (stateless, "_reparametrize_module", _noticed),
            (nn.Module, "train", _with_mode_noted),
            (nn.modules.module, "RemovableHandle", _with_hooks_noted),
            (_symbolic_trace, "_new_patcher", _kept),
            (forward_ad, "enter_dual_level", _shared_level),
            (forward_ad, "exit_dual_level", _ends_with_last),
        ):
            self._own.append((module, name, getattr(module, name)))
            setattr(module, name, wrap(getattr(module, name)))


def _noticed(reparametrize: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def reparametrize_and_notice(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with called("functional_call", module), reparametrize(module, *args, **kwargs) as value:
            yield value

    return reparametrize_and_notice


def _with_mode_noted(train: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @wraps(train)
    def train_of_rank(self: nn.Module, mode: bool = True) -> nn.Module:
        own = _OWN.get()
        if own is not None:
            own.changes.will_set_mode(self)
        return train(self, mode)

    return train_of_rank


def _with_hooks_noted(handle: Callable[..., Any]) -> Callable[..., Any]:
    def handle_of_rank(hooks: dict[int, Any], **more: Any) -> Any:
        own = _OWN.get()
        if own is not None:
            own.changes.will_add_hook(hooks)
        return handle(hooks, **more)

    return handle_of_rank


def _kept(new_patcher: Callable[[], Any]) -> Callable[[], Any]:
    @contextmanager
    def new_patcher_of_rank() -> Iterator[Any]:
        own = _OWN.get()
        with new_patcher() as patcher, own.tracers.of(patcher) if own is not None else nullcontext():
            yield patcher

    return new_patcher_of_rank


_INSIDE = set[int]()  # ranks, by the id of their state, that are inside of the one level of forward mode


def _shared_level(enter: Callable[[], int]) -> Callable[[], int]:
    def enter_dual_level() -> int:
        own = _OWN.get()
        if own is None or id(own) in _INSIDE or not _INSIDE:
            level = enter()  # torch refuses a second one
        else:
            level = forward_ad._current_level = 0
        if own is not None:
            _INSIDE.add(id(own))
        return level

    return enter_dual_level


def _ends_with_last(leave: Callable[..., None]) -> Callable[..., None]:
    def exit_dual_level(*, level: int | None = None) -> None:
        own = _OWN.get()
        if own is not None:
            _INSIDE.discard(id(own))
        if own is not None and _INSIDE:
            forward_ad._current_level = -1
        else:
            leave(level=level)

    return exit_dual_level


_REPLACEMENTS = _Replacements()


def taking_turns() -> AbstractContextManager[None]:
    """A context around all threads of a run; functions of torch that ranks see are torch's own again after the last."""
    # Torch 2.11 without CUDA reads a guard of the first thread with fake tensors after that thread has ended, and
    # crashes. So the thread that starts the others is the first.
    torch._C._ensureCUDADeviceGuardSet()
    return _REPLACEMENTS.in_place()
