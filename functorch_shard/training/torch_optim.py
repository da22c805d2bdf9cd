"""Stock ``torch.optim`` classes on bare tensors: state in, state out. The class does all of the arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import reject
from ..torch_internals.tensors import TorchDispatchMode, arguments_of, is_written, returns_anything

State = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """One tensor to update, with the options of its label.

    ``carried`` are the numbers that the class keeps in its parameter groups; ``None`` for what it has not made yet.
    """

    param: Tensor
    grad: Tensor | None
    state: State
    options: Mapping[str, Any]
    carried: State


def update(cls: type[torch.optim.Optimizer], groups: Sequence[Group]) -> None:
    """One step of the class, in place on parameters and states; a state may get new entries.

    One optimizer for each set of options: torch compares a new parameter group with all earlier ones, and launches its
    kernels per group.
    """
    alike: dict[Any, list[Group]] = {}
    for group in groups:
        # torch takes a momentum for all parameters of a group or for none
        key = _fingerprint(group.options), _fingerprint(group.carried), frozenset(group.state)
        alike.setdefault(key, []).append(group)
    for same in alike.values():
        _step(cls([group.param for group in same], **{**_fastest(cls, same), **same[0].options}), same)


def _fingerprint(options: Mapping[str, Any]) -> Any:
    """Equal for equal options: numbers and texts by value, all else (tensors, lists) by identity."""
    plain = (bool, int, float, str, type(None))
    return frozenset((name, type(x), x if isinstance(x, plain) else id(x)) for name, x in options.items())


def _step(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> None:
    entries = optimizer.param_groups[0]
    entries.update({name: x for name, x in groups[0].carried.items() if x is not None})
    for group in groups:
        group.param.grad = group.grad
        for name, value in optimizer.state[group.param].items():  # Adagrad makes state before the first step
            group.state[name] = group.state.get(name, value)
        optimizer.state[group.param] = group.state
    try:
        optimizer.step()
    finally:
        for group in groups:
            group.param.grad = None
    for group in groups:
        group.carried.update({name: entries.get(name) for name in group.carried})


def initial_state(
    cls: type[torch.optim.Optimizer], param: Tensor, options: Mapping[str, Any], carried: Iterable[str] = ()
) -> tuple[State, State]:
    """What the class makes for ``param`` before its first update, and the ``carried`` numbers of its groups.

    torch makes state in the first ``step``. A step with zero gradients would not do: it moves counters, and averages.
    So the step runs until it is about to write, and no further.
    """
    state = _FirstValues()
    group = Group(param, torch.zeros((), dtype=param.dtype, device=param.device).expand_as(param), state, options, {})
    optimizer = cls([param], **{**_fastest(cls, [group]), **options})
    entries = dict(optimizer.param_groups[0])
    try:
        with _UntilWrite(group), without_compiling():
            _step(optimizer, [group])
    except _AboutToWrite:
        pass
    return {**state, **state.first}, {name: entries.get(name) for name in carried}


def without_compiling() -> AbstractContextManager[Any]:
    """Functions that a class has compiled run as they are written: a look at their operators needs those."""
    stance: Any = torch.compiler.set_stance("force_eager")
    return stance


def check_options(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
    """Raise unless ``cls`` is made with options of these names."""
    _, *parameters = inspect.signature(cls).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    problems = [f"{name!r}: {cls.__name__} has no such option" for name in options if name not in known]
    reject("optimizer", problems, f"Its options are {', '.join(known)}.", TypeError)


def group_options(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a parameter group, with the class's own defaults."""
    (group,) = cls([torch.zeros(1)], **options).param_groups
    return {name: value for name, value in group.items() if name != "params"}


_IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without the choice of an implementation, which may not exist for a probe on the CPU."""
    return {name: value for name, value in options.items() if name not in _IMPLEMENTATIONS}


def _fastest(cls: type[torch.optim.Optimizer], groups: Sequence[Group]) -> dict[str, Any]:
    """``fused=True`` where the class has it and the user chose nothing."""
    chosen = any(group.options.get(name) is not None for group in groups for name in _IMPLEMENTATIONS)
    fits = all(group.param.is_floating_point() and group.param.device.type in ("cpu", "cuda") for group in groups)
    return {"fused": True} if fits and not chosen and "fused" in inspect.signature(cls).parameters else {}


class _AboutToWrite(Exception):  # noqa: N818  (no error: the way out of the optimizer's step)
    pass


class _FirstValues(dict[str, Any]):
    """A state that remembers what each entry was at first: a counter that is a Python number moves before any write."""

    def __init__(self) -> None:
        super().__init__()
        self.first: State = {}

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.first.setdefault(name, value)


class _UntilWrite(TorchDispatchMode):
    """Stops before the first write to the parameter or to its state; what is written to the gradient is left out."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.grad, self.kept = group.grad, lambda: [group.param, *group.state.values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = [arg for arg, spec in zip(args, arguments_of(func), strict=False) if is_written(spec)]
        flat = [x for arg in written for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
        if any(_in_one_place(x, k) for x in flat for k in self.kept()):
            raise _AboutToWrite
        if any(_in_one_place(x, self.grad) for x in flat):
            return args[0] if returns_anything(func) else None
        return func(*args, **(kwargs or {}))


def _in_one_place(a: Any, b: Any) -> bool:
    """Whether two tensors share their memory, as a parameter and its ``.data`` do."""
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return tensors and (a is b or a.untyped_storage() is b.untyped_storage())
