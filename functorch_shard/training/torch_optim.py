"""Call ``torch.optim`` classes on plain tensors with explicit state. The class does all of the arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..eager import without_compiling
from ..errors import reject
from ..torch_internals.tensors import TorchDispatchMode, arguments_of, is_number, is_written, returns_anything
from ..torch_internals.tracing import as_under_compiler, traced_as_it_runs
from ..torch_internals.transforms import being_traced

State = dict[str, Any]
_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Group:
    """One tensor to update, with the options of its label.

    ``carried`` are the numbers that the class keeps in its parameter groups; ``None`` before it creates them.
    """

    param: Tensor
    grad: Tensor | None
    state: State
    options: Mapping[str, Any]
    carried: State


def update(cls: type[torch.optim.Optimizer], groups: Sequence[Group]) -> None:
    """Run one step of the class, in place on parameters and states; a state may get new entries.

    There is one optimizer object for each set of options: torch compares a new parameter group with all earlier ones,
    and launches kernels per group.
    """
    batches: dict[Any, list[Group]] = {}
    for group in groups:
        # torch expects momentum for all parameters of a group or for none
        key = fingerprint(group.options), fingerprint(group.carried), frozenset(group.state)
        batches.setdefault(key, []).append(group)
    for same in batches.values():
        options = {**_implementation(cls, same), **same[0].options}
        later = {name: _number(x, options) for name, x in options.items() if is_number(x)}  # constructors compare it
        _step(cls([group.param for group in same], **{**options, **dict.fromkeys(later, 0.5)}), same, later)


def _number(x: Tensor, options: Mapping[str, Any]) -> Any:
    """A traced number as the class takes it: fused kernels take a tensor, the others a scalar."""
    return x if options.get("fused") else x.item()


def fingerprint(options: Mapping[str, Any]) -> Any:
    """Equal for equal options: numbers and strings by value, anything else (tensors, lists) by identity."""
    plain = (bool, int, float, str, type(None))
    return frozenset((name, type(x), x if isinstance(x, plain) else id(x)) for name, x in options.items())


def _step(optimizer: torch.optim.Optimizer, groups: Sequence[Group], options: Mapping[str, Any] = _NONE) -> None:
    entries = optimizer.param_groups[0]
    entries.update(options)
    entries.update({name: x for name, x in groups[0].carried.items() if x is not None})
    for group in groups:
        group.param.grad = group.grad
        for name, value in optimizer.state[group.param].items():  # Adagrad creates state before the first step
            group.state[name] = group.state.get(name, value)
        optimizer.state[group.param] = group.state
    try:
        with _as_arithmetic(groups) if entries.get("capturable") and being_traced() else nullcontext():
            optimizer.step()
    finally:
        for group in groups:
            group.param.grad = None
    for group in groups:
        group.carried.update({name: entries.get(name) for name in group.carried})


@contextmanager
def _as_arithmetic(groups: Sequence[Group]) -> Iterator[None]:
    """Have the class compute with step counts as tensors, and in float64, in which it counts eagerly.

    In float32, ``1 - 0.999**step`` has half of the digits at first.
    """
    counts = [(group.state, name) for group in groups for name, x in group.state.items() if _is_count(x)]
    for state, name in counts:
        state[name] = state[name].double()
    with as_under_compiler():
        yield
    for state, name in counts:
        state[name] = state[name].float()


def _is_count(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.ndim and x.dtype == torch.float32


def initial_state(
    cls: type[torch.optim.Optimizer],
    param: Tensor,
    options: Mapping[str, Any],
    carried: Iterable[str] = (),
    changes: Mapping[str, Any] = _NONE,
) -> tuple[State, State]:
    """Return the state of ``param`` before its first update, and the ``carried`` numbers of its groups.

    torch creates state in the first ``step``. A step with zero gradients would change counters and averages, so the
    step is stopped before its first write. A schedule has made ``changes`` in the options before it.
    """
    state = _FirstValues()
    group = Group(param, torch.zeros((), dtype=param.dtype, device=param.device).expand_as(param), state, options, {})
    optimizer = cls([param], **{**_implementation(cls, [group]), **options})
    entries = dict(optimizer.param_groups[0])
    try:
        with _UntilWrite(group), without_compiling():
            _step(optimizer, [group], changes)
    except _AboutToWrite:
        pass
    return {**state, **state.first}, {name: entries.get(name) for name in carried}


def check_options(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
    """Raise unless ``cls`` has options of these names."""
    if callable(options.get("lr")):
        problem = "'lr': got a function. A schedule is called by the program, and its value is an option of each step"
        reject("optimizer", [problem], "opt.step(params, grads=grads, state=state, lr=schedule(i))", TypeError)
    _, *parameters = inspect.signature(cls).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    problems = [f"{name!r}: {cls.__name__} has no such option" for name in options if name not in known]
    reject("optimizer", problems, f"Its options are {', '.join(known)}.", TypeError)


def group_options(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a parameter group, including defaults of the class."""
    (group,) = cls([torch.zeros(1, 1)], **options).param_groups
    return {name: value for name, value in group.items() if name != "params"}


_IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` without those that select an implementation, which may not exist on the CPU."""
    return {name: value for name, value in options.items() if name not in _IMPLEMENTATIONS}


def _implementation(cls: type[torch.optim.Optimizer], groups: Sequence[Group]) -> dict[str, Any]:
    """The fastest that the class has, unless the user selected one; traced, one that reads no tensor on the host."""
    chosen = any(group.options.get(name) is not None for group in groups for name in _IMPLEMENTATIONS)
    fits = all(group.param.is_floating_point() and not group.param.is_meta for group in groups)
    known = inspect.signature(cls).parameters
    fuses = fits and not chosen and "fused" in known
    if being_traced() and not (fuses and traced_as_it_runs()):
        return {name: x for name, x in (("foreach", False), ("capturable", True)) if name in known}
    return {"fused": True} if fuses else {}


class _AboutToWrite(Exception):  # noqa: N818  (not an error: it ends the optimizer's step)
    pass


class _FirstValues(dict[str, Any]):
    """A state that records the first value of each entry: a Python number changes before any tensor is written."""

    def __init__(self) -> None:
        super().__init__()
        self.first: State = {}

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.first.setdefault(name, value)


class _UntilWrite(TorchDispatchMode):
    """Stops before the first write to the parameter or its state; writes to the gradient are skipped."""

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
    """Whether two tensors share memory, for example a parameter and its ``.data``."""
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return tensors and (a is b or a.untyped_storage() is b.untyped_storage())
