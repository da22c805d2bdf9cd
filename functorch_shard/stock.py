"""Stock ``torch.optim`` classes on bare tensors: state in, state out. The class does all of the arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import reject

State = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """One tensor to update, with the options of its label."""

    param: Tensor
    grad: Tensor | None
    state: State
    options: Mapping[str, Any]


def update(cls: type[torch.optim.Optimizer], groups: Sequence[Group]) -> None:
    """One step of the class, in place on parameters and states; a state may get new entries.

    One optimizer for each set of options: torch compares a new parameter group with all earlier ones, and launches its
    kernels per group.
    """
    alike: dict[Any, list[Group]] = {}
    for group in groups:
        # torch takes a momentum for all parameters of a group or for none
        alike.setdefault((_fingerprint(group.options), frozenset(group.state)), []).append(group)
    for same in alike.values():
        _step(cls([group.param for group in same], **{**_fastest(cls, same), **same[0].options}), same)


def _fingerprint(options: Mapping[str, Any]) -> Any:
    """Equal for equal options: numbers and texts by value, all else (tensors, lists) by identity."""
    plain = (bool, int, float, str, type(None))
    return frozenset((name, type(x), x if isinstance(x, plain) else id(x)) for name, x in options.items())


def _step(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> None:
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


def initial_state(cls: type[torch.optim.Optimizer], param: Tensor, options: Mapping[str, Any]) -> State:
    """The state that the class makes for ``param`` before its first update; ``None`` for what comes with the update.

    torch makes state in the first ``step``. A step with zero gradients would not do: it moves counters, and averages.
    So the step runs until it is about to write, and no further.
    """
    state = _FirstValues()
    group = Group(param, torch.zeros((), dtype=param.dtype, device=param.device).expand_as(param), state, options)
    optimizer = cls([param], **{**_fastest(cls, [group]), **options})
    try:
        with _UntilWrite(param, state):
            _step(optimizer, [group])
    except _AboutToWrite:
        pass
    start = {**state, **state.first}
    return {name: start.get(name) for name in state_names(cls, options)}


def state_names(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> list[str]:
    """What the class keeps for a parameter."""
    group = Group(torch.zeros(1), torch.zeros(1), {}, _plain(options))
    update(cls, [group])
    return list(group.state)


def check_elementwise(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
    """Raise unless ``cls`` treats the elements of a tensor each for itself, so that a shard is as good as the whole."""
    start = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    grads = torch.tensor([[[0.5, 0.25], [-4.0, 1.0]], [[-1.0, 0.5], [8.0, -2.0]]])
    cls([start.clone()], **options)  # what is wrong with the options is the class's to say
    elements = list(zip(start.view(4, 1), grads.view(2, 4, 1).unbind(1), strict=True))
    try:
        whole = _trajectory(cls, start, grads, options).flatten()
        parts = torch.cat([_trajectory(cls, x, gs, options) for x, gs in elements])
        steps = torch.cat([_step_by_step(cls, x, gs, options) for x, gs in elements])
    except Exception as error:
        raise TypeError(_refusal(cls, f"it does not step on 1-D tensors ({type(error).__name__}: {error})")) from error
    if not torch.allclose(whole, parts, rtol=1e-5, atol=0):
        raise TypeError(_refusal(cls, "its update of one element depends on others, so a shard is not enough"))
    if not torch.allclose(parts, steps, rtol=1e-5, atol=0):
        raise TypeError(
            f"optimizer: {cls.__name__} is no pure function of parameter, gradient and state: it keeps something from "
            "step to step outside self.state[parameter], or makes its state from the first gradient."
        )


def check_options(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
    """Raise unless ``cls`` is made with options of these names."""
    _, *parameters = inspect.signature(cls).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    problems = [f"{name!r}: {cls.__name__} has no such option" for name in options if name not in known]
    reject("optimizer", problems, f"It has {', '.join(known)}.", TypeError)


def group_options(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a parameter group, with the class's own defaults."""
    (group,) = cls([torch.zeros(1)], **options).param_groups
    return {name: value for name, value in group.items() if name != "params"}


def _refusal(cls: type[torch.optim.Optimizer], reason: str) -> str:
    return (
        f"optimizer: {cls.__name__} is not elementwise: {reason}. Gather what it needs, update whole matrices, and "
        "shard() the result."
    )


def _trajectory(cls: Any, start: Tensor, grads: Tensor, options: Mapping[str, Any]) -> Tensor:
    """As everyone uses the class."""
    group = Group(start.clone(), None, {}, _plain(options))
    optimizer = cls([group.param], **group.options)
    for grad in grads:
        group.param.grad = grad.clone()
        optimizer.step()
    return group.param


def _step_by_step(cls: Any, start: Tensor, grads: Tensor, options: Mapping[str, Any]) -> Tensor:
    """As it is used here: nothing but parameter and state lives from one step to the next."""
    plain, param = _plain(options), start.clone()
    state = {name: x for name, x in initial_state(cls, param, plain).items() if x is not None}
    for grad in grads:
        update(cls, [Group(param, grad.clone(), state, plain)])
    return param


_IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
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
    """Stops before the first write to the parameter or to its state."""

    def __init__(self, param: Tensor, state: State) -> None:
        super().__init__()
        self.param, self.state = param, state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = [arg for arg, spec in zip(args, func._schema.arguments, strict=False) if _is_written(spec)]
        kept = [self.param, *self.state.values()]
        flat = [x for arg in written for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
        if any(x is k for x in flat for k in kept):
            raise _AboutToWrite
        return func(*args, **(kwargs or {}))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
