"""Test whether an optimizer class updates each parameter by itself, and find what it keeps for one.

Note [State of whole parameters]: what a class keeps for a parameter, nested lists and dicts included, is flattened into
named entries, ``"exp_avg"`` or ``"GG.0"``: tensors of any shape, and numbers. The entries of a shape are found by two
steps with numbers of that shape. Where the state that a class begins with does not depend on values, it is known before
the first step (momentum of zeros). Otherwise a class makes it from its first gradient (SGD's momentum, SOAP's
eigenvectors): then a further entry, ``"owner.started"``, says whether it has, and until then entries are zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from ...eager import without_compiling
from ...torch_internals.transforms import outside_transforms
from ..optimizer_probe import (
    NUMBERS,
    Class,
    Refusal,
    changed,
    check_interface,
    entries_of,
    on_cpu,
    once,
    refusal,
    same,
    starts_from_rate,
    with_nonzero_lr,
)
from ..optimizer_step import CARRIED, NUMBER_DTYPES
from ..torch_optim import Group, initial_state, update

STARTED = "owner.started"
_MATRICES = ((6, 4), (4, 7), (5, 5))
_VECTORS = ((3,), (8,))
_NUM_STEPS = 8
_WHAT = "whole parameters"
_Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Entry:
    """One value of a parameter's state: a tensor, or a number, which is stored as a scalar and of type ``kind``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: type
    device: torch.device


@dataclass(frozen=True)
class Spec:
    """What a class keeps for a parameter of one shape and dtype.

    Args:
        entries: all of it, in the order of the leaves of ``treedef``, then ``STARTED``.
        treedef: the structure of ``{**state, **numbers of its parameter groups}``.
        carried: the numbers that it keeps in its parameter groups.
        known: whether the state before the first step is known.
    """

    entries: tuple[Entry, ...]
    treedef: Any
    carried: tuple[str, ...]
    known: bool


@once
def probe_whole(cls: Class, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the numbers that ``cls`` keeps in its groups, or raise a ``TypeError``: it mixes parameters."""
    with outside_transforms(), torch.inference_mode(False), torch.no_grad(), on_cpu(), without_compiling():
        check_interface(cls, options, _WHAT)
        try:
            carried = _compared(cls, options, _MATRICES)
        except Refusal:
            raise
        except Exception as error:
            reason = f"its step fails on matrices ({type(error).__name__}: {error})"
            raise refusal(cls, reason, _WHAT) from error
        shapes = _MATRICES if _takes_only_matrices(cls, options) else (*_MATRICES, *_VECTORS)
        _compared(cls, options, shapes)
        if "lr" in inspect.signature(cls).parameters:  # with a small one, estimates of a distance do not begin to grow
            _compared(cls, {**options, "lr": 1.0}, shapes)
    return carried


def _takes_only_matrices(cls: Class, options: Mapping[str, Any]) -> bool:
    try:
        _by_objects(cls, options, _VECTORS, [[0]])
    except Exception:
        return True
    return False


def _compared(cls: Class, options: Mapping[str, Any], shapes: _Shapes) -> tuple[str, ...]:
    """Parameters by one optimizer object for all, by one for each, and by a new one in each step."""
    together, before, after = _by_objects(cls, options, shapes, [range(len(shapes))])
    carried = changed(cls, before, after, _WHAT)
    if others := [name for name, x in after.items() if name not in carried and not same(before.get(name), x)]:
        raise refusal(cls, f"it changes {', '.join(others)} in its parameter groups, which is not a number", _WHAT)
    alone, numbers = _one_by_one(cls, options, shapes, carried)
    for name in carried:
        if any(abs(each[name] - after[name]) > 1e-9 * abs(after[name]) for each in numbers):
            raise refusal(cls, f"it keeps {name!r} in its parameter groups, which depends on all parameters", _WHAT)
    if not _close(together, alone):
        apart, *_ = _by_objects(cls, options, shapes, [[i] for i in range(len(shapes))])
        raise refusal(cls, _IMPURE if _close(together, apart) else "its update of a parameter depends on others", _WHAT)
    return carried


_IMPURE = "it stores something outside of self.state[parameter] and the numbers in its groups"


def _by_objects(cls: Class, options: Mapping[str, Any], shapes: _Shapes, groups: Sequence[Any]) -> tuple[Any, ...]:
    params = [torch.nn.Parameter(_numbers(shape, i)) for i, shape in enumerate(shapes)]
    optimizers = [cls([params[i] for i in group], **options) for group in groups]
    before = entries_of(optimizers[0])
    for step in range(_NUM_STEPS):
        for i, param in enumerate(params):
            param.grad = _gradient(shapes[i], i, step)
        for optimizer in optimizers:
            optimizer.step()
    return params, before, entries_of(optimizers[0])


def _one_by_one(
    cls: Class, options: Mapping[str, Any], shapes: _Shapes, carried: Sequence[str]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Parameters, and the numbers that each has in its group."""
    params, numbers = [_numbers(shape, i) for i, shape in enumerate(shapes)], [dict.fromkeys(carried) for _ in shapes]
    for i, param in enumerate(params):
        state: dict[str, Any] = {}
        for step in range(_NUM_STEPS):
            update(cls, [Group(param, _gradient(shapes[i], i, step), state, options, numbers[i])])
    return params, numbers


def _close(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-6, atol=1e-9, equal_nan=True) for x, y in zip(a, b, strict=True))


def _numbers(shape: Sequence[int], seed: int) -> Tensor:
    """Numbers between -1 and 1 other than 0, without a random generator."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel, dtype=torch.float64) + 0.37 * (seed + 1)) * 12.9898).sin().reshape(shape)


def _gradient(shape: Sequence[int], i: int, step: int) -> Tensor:
    """About the same direction in each step, as estimates of a distance need it, of sizes that vary with parameters."""
    return (_numbers(shape, i + 3) + 0.3 * _numbers(shape, 7 * step + i)) * 10.0 ** (i - 1)


def find_spec(
    cls: Class,
    options: Mapping[str, Any],
    carried: Sequence[str],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Spec:
    """What ``cls`` keeps for a parameter of this shape: by two steps with numbers of the shape, Note above.

    Raises:
        TypeError: it keeps something that is neither a tensor nor a number, or something else from step to step.
    """
    options = with_nonzero_lr(dict(options))
    try:
        with outside_transforms(), torch.inference_mode(False), torch.no_grad():
            return _found(_Trial(cls, options, carried, tuple(shape), dtype, device))
    except Refusal as error:
        raise TypeError(str(error)) from error.__cause__


@dataclass(frozen=True)
class _Trial:
    cls: Class
    options: Mapping[str, Any]
    carried: Sequence[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def param(self) -> Tensor:
        return _numbers(self.shape, 0).to(self.device, self.dtype)

    def step(self, param: Tensor, state: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
        group = Group(param, _numbers(self.shape, 3).to(param), state, self.options, numbers)
        update(self.cls, [group])
        return kept(group)


def _found(trial: _Trial) -> Spec:
    state, numbers, param = {}, dict.fromkeys(trial.carried), trial.param()
    after_one = trial.step(param, state, numbers)
    entries, treedef = _flattened(trial, after_one)
    known = _begins_as_known(trial, (entries, treedef), {"param": param, "state": after_one})
    again = _flattened(trial, trial.step(param.clone(), state, numbers))
    if again != (entries, treedef):
        names = ", ".join(sorted({e.name for e in again[0]} ^ {e.name for e in entries})) or "what it has"
        raise refusal(trial.cls, f"its state changes its shape from step to step ({names})", _WHAT)
    started = [Entry(STARTED, (), torch.bool, bool, trial.device)]
    return Spec((*entries, *([] if known else started)), treedef, tuple(trial.carried), known)


def _begins_as_known(trial: _Trial, form: tuple[Any, Any], after: Any) -> bool:
    """Whether a first step from :func:`begin` is the first step from nothing: parameter and state are ``after`` it."""
    state, numbers = initial_state(trial.cls, torch.zeros_like(trial.param()), trial.options, trial.carried)
    if starts_from_rate(trial.cls, trial.options, trial.param()):
        return False
    if _flattened(trial, {**state, **_prefixed(numbers)}) != form:
        return False
    param = trial.param()
    again: Any = {"state": trial.step(param, state, numbers), "param": param}
    (ours, one), (theirs, other) = optree.tree_flatten(again), optree.tree_flatten(after)
    return one == other and all(map(_alike, ours, theirs))


def _alike(a: Any, b: Any) -> bool:
    x, y = (torch.as_tensor(value).double() for value in (a, b))
    return torch.allclose(x, y, rtol=1e-3, atol=1e-6, equal_nan=True)


def begin(cls: Class, options: Mapping[str, Any], spec: Spec, param: Tensor) -> dict[str, Any]:
    """The state of a parameter like ``param`` before the first step, where it is known."""
    state, numbers = initial_state(cls, torch.zeros_like(param), options, spec.carried)
    return {**state, **_prefixed(numbers)}


def kept(group: Group) -> dict[str, Any]:
    """State and numbers of a group after a step."""
    return {**group.state, **_prefixed(group.carried)}


def _prefixed(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {CARRIED + name: x for name, x in numbers.items() if x is not None}


def _flattened(trial: _Trial, tree: Any) -> tuple[list[Entry], Any]:
    paths, leaves, treedef = optree.tree_flatten_with_path(tree)
    names = [".".join(map(str, path)) for path in paths]
    strange = [
        f"{name!r} is a {type(x).__name__}"
        for name, x in zip(names, leaves, strict=True)
        if type(x) not in (Tensor, torch.nn.Parameter, *NUMBERS)
    ]
    if strange:
        raise refusal(trial.cls, f"its state has more than tensors and numbers: {', '.join(strange)}", _WHAT)
    return [_entry(name, x, trial.device) for name, x in zip(names, leaves, strict=True)], treedef


def _entry(name: str, x: Any, device: torch.device) -> Entry:
    if isinstance(x, Tensor):
        return Entry(name, tuple(x.shape), x.dtype, Tensor, x.device)
    return Entry(name, (), NUMBER_DTYPES[type(x)], type(x), device)
