"""Call ``torch.optim`` classes on plain tensors with explicit state. The class does all of the arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from ..torch_internals.autograd import (
    TorchDispatchMode,
    as_under_compiler,
    being_traced,
    is_number,
    outside_transforms,
    traced_as_it_runs,
    untraced,
    without_compiling,
)
from ..torch_internals.tensors import arguments_of, identity_of_storage, is_written, returns_anything

Class = type[torch.optim.Optimizer]
Options = Mapping[str, Any]
State = dict[str, Any]
NUMBERS = (bool, int, float)

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
# Their foreach kernels write to no gradient, read in their sources. That of SGD does with Nesterov momentum.
_LEAVE_GRADIENTS = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
_IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")


@dataclass(frozen=True)
class Group:
    """One tensor to update, with the options of its label: the same object for all tensors of the label.

    ``numbers`` are those that the class keeps in its parameter groups; ``None`` before it creates them.
    """

    param: Tensor
    grad: Tensor | None
    state: State
    options: Options
    numbers: State


@dataclass(frozen=True)
class Traits:
    """What a class keeps with given options.

    Args:
        state: the names of its state for a parameter.
        numbers: the names of numbers in its parameter groups that a step changes.
        known: whether the state before the first step is known; otherwise the first step creates it.
    """

    state: tuple[str, ...]
    numbers: tuple[str, ...]
    known: bool


def update(cls: Class, groups: Sequence[Group], known: Collection[str]) -> None:
    """Run one step of the class, whose options are ``known``, in place on parameters and states, which may grow.

    There is one optimizer object for each set of options: torch compares a new parameter group with all earlier ones,
    and launches kernels per group. torch expects momentum for all parameters of a group or for none.
    """
    batches: dict[Any, list[Group]] = {}
    for group in groups:
        key = id(group.options), frozenset(group.state), frozenset(group.numbers.items())
        batches.setdefault(key, []).append(group)
    for same in batches.values():
        options = {**_implementation(same[0].options, [group.param for group in same], known), **same[0].options}
        later = {name: _number(x, options) for name, x in options.items() if is_number(x)}  # constructors compare it
        _step(cls([group.param for group in same], **{**options, **dict.fromkeys(later, 0.5)}), same, later)


def _number(x: Tensor, options: Options) -> Any:
    """A traced number as the class takes it: fused kernels take a tensor, the others a scalar."""
    return x if options.get("fused") else x.item()


def _step(optimizer: torch.optim.Optimizer, groups: Sequence[Group], options: Options) -> None:
    entries, kept = optimizer.param_groups[0], groups[0].numbers
    entries.update(options)
    entries.update({name: x for name, x in kept.items() if x is not None})
    before = dict(entries)
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
    for name, x in entries.items():
        if x is not before.get(name) and x != before.get(name) and name not in kept and isinstance(x, NUMBERS):
            raise RuntimeError(_CHANGED.format(cls=type(optimizer).__name__, name=name))
    for group in groups:
        group.numbers.update({name: entries.get(name) for name in kept})


_CHANGED = (
    "step: {cls} changes {name!r} in its parameter groups, which it does not with the options of the optimizer. "
    "Pass the options of this step to fs.optimizer."
)


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


def _implementation(options: Options, params: Sequence[Tensor], known: Collection[str]) -> dict[str, Any]:
    """The fastest that the class has, unless the user selected one; traced, one that reads no tensor on the host."""
    chosen = [name for name in _IMPLEMENTATIONS if options.get(name) is not None]
    fuses = "fused" in known and not chosen
    fuses = fuses and not [x for x in params if x.is_meta or not x.is_floating_point()]
    if being_traced() and not (fuses and traced_as_it_runs()):
        return {name: x for name, x in (("foreach", False), ("capturable", True)) if name in known}
    return {"fused": True} if fuses else {}


def option_names(cls: Class) -> list[str]:
    """The options of ``cls``: the parameters of its constructor without the first, ``"**"`` if it takes any."""
    _, *parameters = inspect.signature(cls).parameters.values()
    return ["**" if x.kind is x.VAR_KEYWORD else x.name for x in parameters]


def may_write_gradient(cls: Class, options: Options, param: Tensor, known: Collection[str]) -> bool:
    """Whether a step of ``cls`` may write to the gradient of ``param``; loops and fused kernels of torch do not."""
    if cls in _LEAVE_GRADIENTS:
        return False
    chosen = {**_implementation(options, [param], known), **options}
    looped = chosen.get("fused") or (param.is_cpu and not chosen.get("foreach"))
    return not looped or cls not in ELEMENTWISE


def initial_state(cls: Class, param: Tensor, options: Options, numbers: Sequence[str] = ()) -> tuple[State, State]:
    """Return the state of ``param`` before its first update, and the ``numbers`` of its groups.

    torch creates state in the first ``step``. A step with zero gradients would change counters and averages, so the
    step is stopped before its first write.
    """
    state = _FirstValues()
    zeros, kept = torch.zeros((), dtype=param.dtype, device=param.device), dict.fromkeys(numbers)
    group = Group(param, zeros.expand_as(param), state, options, kept)
    optimizer = cls([param], **{**_implementation(options, [param], option_names(cls)), **options})
    entries = dict(optimizer.param_groups[0])
    try:
        with _UntilWrite(group), without_compiling():
            _step(optimizer, [group], {})
    except _AboutToWrite:
        pass
    return {**state, **state.first}, {name: entries.get(name) for name in numbers}


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
    return isinstance(a, Tensor) and isinstance(b, Tensor) and identity_of_storage(a) == identity_of_storage(b)


_TRIAL_STEPS = 12  # more than warm-ups and lookaheads take


def find_traits(cls: Class, options: Options) -> Traits:
    """Return what ``cls`` keeps with ``options``, found by a dozen steps on four elements.

    Raises:
        TypeError: it keeps what is not a tensor of the parameter's shape, a number or a string, or changes its options.
    """
    options = on_host(options)
    with apart():
        param, kept = torch.nn.Parameter(torch.ones(4, dtype=torch.float64)), {}
        optimizer = cls([param], **options)
        before = dict(optimizer.param_groups[0])
        for i in range(_TRIAL_STEPS):
            param.grad = torch.linspace(-1, i % 3, 4, dtype=torch.float64)
            optimizer.step()
            kept.update(optimizer.state[param])
        odd = [f"{name!r} is a {type(x).__name__}" for name, x in kept.items() if not _fits(x, param)]
        if odd:
            raise refusal(cls, f"its state cannot be sharded like its parameter: {', '.join(odd)}")
        numbers = changed_numbers(cls, before, optimizer.param_groups[0])
        start = torch.linspace(1, 2, 4, dtype=torch.float64)
        return Traits(tuple(kept), numbers, begins_as_known(cls, options, numbers, start, start))


def _fits(x: Any, param: Tensor) -> bool:
    tensor = type(x) in (Tensor, torch.nn.Parameter) and x.shape in ((), param.shape)
    return tensor or x is None or isinstance(x, (*NUMBERS, str))


def changed_numbers(cls: Class, before: Options, after: Options) -> tuple[str, ...]:
    """The numbers of a parameter group that steps have changed; an option of the class among them is refused."""
    names = [name for name, x in after.items() if isinstance(x, NUMBERS) and not _same(before.get(name), x)]
    if own := [name for name in names if name in option_names(cls)]:
        raise refusal(cls, f"it changes its own options ({', '.join(own)}), and here options are arguments")
    return tuple(names)


def begins_as_known(cls: Class, options: Options, numbers: Sequence[str], start: Tensor, like: Tensor) -> bool:
    """Whether a step from the initial state of ``like`` is the first step from nothing, with any learning rate.

    It is not where the first step makes the state of its gradient, or of its rate: ASGD and Rprop.
    """
    known = option_names(cls)
    for rate in ({}, {"lr": 0.75}) if "lr" in known else ({},):
        begun, in_group = initial_state(cls, like, options, numbers)
        groups = [
            Group(start.clone(), start.clone(), state, {**options, **rate}, kept)
            for state, kept in (({}, dict.fromkeys(numbers)), (begun, in_group))
        ]
        for group in groups:
            update(cls, [group], known)
        if not _alike(*((group.param, group.state, group.numbers) for group in groups)):
            return False
    return True


def _alike(a: Any, b: Any) -> bool:
    (ours, one), (theirs, other) = optree.tree_flatten(a), optree.tree_flatten(b)
    return one == other and all(map(_close, ours, theirs))


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, str):
        return a == b
    x, y = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-3, atol=1e-6, equal_nan=True)


def _same(a: Any, b: Any) -> bool:
    """Whether two numbers of a group are equal, and of one type."""
    return type(a) is type(b) and a == b


def check_interface(cls: Class) -> None:
    """Raise unless a step of ``cls`` is a function of parameter, gradient and state, without modes or a closure."""
    if cls is torch.optim.LBFGS:
        raise refusal(cls, "its step needs closure, and here a step gets gradients and no loss")
    if cls is torch.optim.SparseAdam:
        raise refusal(cls, "it takes sparse gradients, and here they are dense")
    if callable(getattr(cls, "train", None)) and callable(getattr(cls, "eval", None)):
        raise refusal(
            cls, "it has a train mode and an eval mode with different parameters, and a pure step has no modes"
        )


def refusal(cls: Class, reason: str, advice: str = "") -> TypeError:
    """Why ``cls`` cannot update shards, or whole parameters, and what to do instead."""
    by_hand = "Gather what it needs, update whole tensors, and shard() the result."
    return TypeError(f"optimizer: {cls.__name__}: {reason}. {advice or by_hand}")


@contextmanager
def apart() -> Iterator[None]:
    """A context for a trial of a class: on the CPU, outside of transforms, tracers and compiled code."""
    device: AbstractContextManager[Any] = nullcontext()
    if torch.get_default_device().type != "cpu":  # a device context costs time in every operation
        device = torch.device("cpu")
    with ExitStack() as stack:
        for each in (untraced(), outside_transforms(), torch.inference_mode(False), torch.no_grad(), device):
            stack.enter_context(each)
        stack.enter_context(without_compiling())
        yield


def on_host(options: Options) -> dict[str, Any]:
    """``options`` without those that select an implementation, which the CPU may not have; tensors as numbers."""
    return {name: _plain(x) for name, x in options.items() if name not in _IMPLEMENTATIONS}


def _plain(x: Any) -> Any:
    """A float32 tensor as the number that it is: each implementation rounds it otherwise."""
    if type(x) in (tuple, list):
        return type(x)(_plain(each) for each in x)
    return x.item() if isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta else x
