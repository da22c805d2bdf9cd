"""Test whether an optimizer class updates shards as it updates whole tensors.

Note [Probing]: the class runs in two ways: on whole tensors of several shapes and sizes, and on uneven flat parts of
the same elements, as on independent ranks, with only parameter, gradient and state kept between steps. Both must give
the same parameters. Sizes are above the thresholds of classes that quantize or factor large tensors only, matrices are
wide enough to be treated as such, and there are more steps than warm-ups and lookaheads take. Dependences that appear
for some values only, such as the projection of a gradient that is orthogonal to its parameter, are found in the
operators: one whose result has fewer elements than the tensor combines elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from ..containers import is_hashable
from ..eager import without_compiling
from ..torch_internals.tensors import TorchDispatchMode
from ..torch_internals.tracing import untraced
from ..torch_internals.transforms import outside_transforms
from .torch_optim import Group, initial_state, plain_options, update

Class = type[torch.optim.Optimizer]
T = TypeVar("T")
Probe = Callable[[Class, Mapping[str, Any]], T]

_SHAPES = ((160, 130), (8192,), (4, 3, 3, 3), (5,), ())
_NUMEL = sum(map(prod, _SHAPES))
# The parts of two ranks, in two buffers each: odd sizes, boundaries inside a row.
_CUTS = ((0, 4097, 8290), (8290, 25377, _NUMEL))
_NUM_STEPS = 12
_SMALL_SHAPES = ((6, 4), (7,))  # tried first: some classes would invert a matrix of 8192 columns
NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class Traits:
    """The behaviour of a class with given options.

    Args:
        state: the names of its state for a parameter.
        carried: the names of numbers in its parameter groups that a step changes.
        writes_grads: whether a step writes to the gradients.
        starts_from_rate: whether the first step creates the state from its learning rate.
    """

    state: tuple[str, ...]
    carried: tuple[str, ...]
    writes_grads: bool
    starts_from_rate: bool


def once(probe: Probe[T]) -> Probe[T]:
    """``probe`` run once for equal options, with a learning rate that moves; its ``Refusal`` is a ``TypeError``."""

    @lru_cache(maxsize=64)
    def remembered(cls: Class, options: tuple[tuple[str, type, Any], ...]) -> T:
        return probe(cls, {name: value for name, _, value in options})

    @wraps(probe)
    def probed(cls: Class, options: Mapping[str, Any]) -> T:
        options = with_nonzero_lr({name: _as_number(x) for name, x in plain_options(options).items()})
        key = tuple((name, type(value), value) for name, value in sorted(options.items()))
        try:
            return remembered(cls, key) if is_hashable(key) else probe(cls, options)
        except Refusal as error:
            raise TypeError(str(error)) from error.__cause__

    return probed


@once
def probe(cls: Class, options: Mapping[str, Any]) -> Traits:
    """Return the traits of ``cls``, or raise a ``TypeError`` with the reason why it cannot update shards."""
    with untraced(), outside_transforms(), torch.inference_mode(False), torch.no_grad(), on_cpu(), without_compiling():
        check_interface(cls, options)
        _tried(cls, lambda: _whole(cls, options, _SMALL_SHAPES, 2))
        whole = _tried(cls, lambda: _whole(cls, options, _SHAPES, _NUM_STEPS))
        carried = changed(cls, whole.before, whole.after)
        parts = _tried(cls, lambda: [_parts(cls, options, carried, *cuts) for cuts in _CUTS])
        _check_equal(cls, options, whole, parts)
        late = starts_from_rate(cls, options, torch.zeros(1))
    names = dict.fromkeys(name for part in parts for state in part.states for name in state)
    return Traits(tuple(names), carried, whole.writes_grads, late)


def starts_from_rate(cls: Class, options: Mapping[str, Any], param: Tensor) -> bool:
    """Whether the state of ``param`` before the first update depends on the learning rate of that update."""
    states: list[Any] = [initial_state(cls, param, options, changes=changes)[0] for changes in ({}, {"lr": 0.75})]
    return any(not same(*pair) for pair in zip(*map(optree.tree_leaves, states), strict=True))


def switched(cls: Class, options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``changes`` that may select another algorithm: what is not a number, and numbers other than 0 for 0."""
    known = inspect.signature(cls).parameters
    before = {name: options.get(name, known[name].default if name in known else None) for name in changes}
    return {name: x for name, x in changes.items() if name != "lr" and _switches(before[name], x)}


def _switches(before: Any, after: Any) -> bool:
    if before is after:
        return False
    if isinstance(after, (tuple, list)) and type(before) is type(after) and len(before) == len(after):  # such as betas
        return any(map(_switches, before, after))
    numbers = all(isinstance(x, (int, float, Tensor)) and not isinstance(x, bool) for x in (before, after))
    return bool(after) and not before if numbers else type(before) is not type(after) or before != after


def with_nonzero_lr(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with a learning rate other than 0, which a schedule may begin with."""
    rate = options.get("lr")
    return {**options, "lr": 1e-2} if isinstance(rate, (int, float, Tensor)) and not rate else options


def _as_number(x: Any) -> Any:
    """A tensor among the options as the number that it is: a float32 rounds otherwise in each implementation."""
    if type(x) in (tuple, list):
        return type(x)(_as_number(each) for each in x)
    return x.item() if isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta else x


def on_cpu() -> AbstractContextManager[Any]:
    """A device context, or none if the CPU is the default: it costs time in every operation."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@dataclass(frozen=True)
class _Whole:
    """The class on whole tensors: final parameters, and the entries of its groups before and after."""

    end: Tensor
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    writes_grads: bool


@dataclass(frozen=True)
class _Parts:
    """The class on the shards of one rank: final parameters, states, and numbers of its groups."""

    end: Tensor
    states: Sequence[Mapping[str, Any]]
    carried: Mapping[str, Any]


def _whole(cls: Class, options: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], num_steps: int) -> _Whole:
    params = [torch.nn.Parameter(x) for x in _shaped(_start(), shapes)]
    optimizer, watch, writes_grads = cls(params, **options), _Combinations(), False
    before = entries_of(optimizer)
    for step in range(num_steps):
        grads = _shaped(_gradient(step), shapes)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        given = [param.grad for param in params]
        try:
            with watch:
                optimizer.step()
        finally:  # its state is a better reason than the error that follows from it
            _check_kept(cls, optimizer, params)
        writes_grads |= any(not torch.equal(x, grad) for x, grad in zip(given, grads, strict=True) if x is not None)
        if watch.found:
            raise _refusal(cls, f"its update of one element depends on others (it calls {', '.join(watch.found)})")
    return _Whole(torch.cat([x.detach().flatten() for x in params]), before, entries_of(optimizer), writes_grads)


def _parts(cls: Class, options: Mapping[str, Any], carried: Sequence[str], *cuts: int) -> _Parts:
    params = _cut(_start(), cuts)
    begun = [initial_state(cls, param, options, carried) for param in params]
    states = [{name: x for name, x in state.items() if x is not None} for state, _ in begun]
    numbers = [dict(start) for _, start in begun]
    for step in range(_NUM_STEPS):
        every = zip(params, _cut(_gradient(step), cuts), states, numbers, strict=True)
        update(cls, [Group(param, grad, state, options, own) for param, grad, state, own in every])
    return _Parts(torch.cat(params), states, numbers[0])


def _start() -> Tensor:
    return _scattered(0.0) + 1.5 * _scattered(1.0).sign()


def _gradient(step: int) -> Tensor:
    """Gradients of a size that varies with step and element, some of them zero."""
    x = _scattered(2.0).roll(977 * step)
    return (x * torch.linspace(0.5, 2.0, _NUMEL, dtype=x.dtype) * (0.1 + step * 7 % 5)).where(x.abs() > 0.05, 0.0)


@lru_cache(maxsize=4)
def _scattered(seed: float) -> Tensor:
    """Numbers between -1 and 1, without a random generator."""
    i = torch.arange(_NUMEL, dtype=torch.float64)
    return 2 * ((i * 12.9898 + seed * 78.233).sin() * 43758.5453).frac().abs() - 1


def _shaped(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    sizes = [prod(shape) for shape in shapes]
    return [x.reshape(shape).clone() for x, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


def _cut(flat: Tensor, cuts: Sequence[int]) -> list[Tensor]:
    return [flat[a:b].clone() for a, b in pairwise(cuts)]


def entries_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: deepcopy(x) for name, x in optimizer.param_groups[0].items() if name != "params"}


def changed(cls: Class, before: Mapping[str, Any], after: Mapping[str, Any], what: str = "shards") -> tuple[str, ...]:
    """The numbers of a group that steps have changed. Other entries cannot be state; if they matter, results differ."""
    names = [name for name, x in after.items() if not same(before.get(name), x)]
    options = [name for name in names if name in inspect.signature(cls).parameters]
    if options:
        reason = f"it changes its own options ({', '.join(options)}), and here options are arguments"
        raise refusal(cls, reason, what)
    return tuple(name for name in names if isinstance(after[name], NUMBERS))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and a == b


def check_interface(cls: Class, options: Mapping[str, Any], what: str = "shards") -> None:
    """Raise unless ``cls`` is made from a list of parameters, has no modes, and steps without arguments."""
    try:
        cls([torch.ones(2, 2)], **options)
    except (TypeError, ValueError, NotImplementedError):  # errors about the options are left to the class
        raise
    except Exception as error:
        reason = f"it cannot be constructed from a list of parameters ({type(error).__name__}: {error})"
        raise refusal(cls, reason, what) from error
    if all(callable(getattr(cls, mode, None)) for mode in ("train", "eval")):
        reason = "it has a train mode and an eval mode with different parameters, and a pure step has no modes"
        raise refusal(cls, reason, what)
    _, *parameters = inspect.signature(cls.step).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if needed:
        reason = f"its step needs {', '.join(needed)}, and here a step gets gradients and no loss"
        raise refusal(cls, reason, what)


def _tried(cls: Class, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Refusal:
        raise
    except Exception as error:
        reason = f"its step fails on dense tensors of some shapes, 1-D included ({type(error).__name__}: {error})"
        raise _refusal(cls, reason) from error


def _check_kept(cls: Class, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
    for param in params:
        for name, x in optimizer.state[param].items():
            fits = type(x) in (Tensor, torch.nn.Parameter) and tuple(x.shape) in (tuple(param.shape), ())
            if not (fits or x is None or isinstance(x, (*NUMBERS, str))):
                shape = f" of shape {tuple(x.shape)}" if isinstance(x, Tensor) else ""
                kept = f"{name!r} is a {type(x).__name__}{shape} for a parameter of shape {tuple(param.shape)}"
                raise _refusal(cls, f"its state cannot be sharded like its parameter: {kept}")


def _check_equal(cls: Class, options: Mapping[str, Any], whole: _Whole, parts: Sequence[_Parts]) -> None:
    for name in parts[0].carried:
        values = [whole.after[name], *(part.carried[name] for part in parts)]
        if any(abs(x - values[0]) > 1e-9 * abs(values[0]) for x in values):
            raise _refusal(
                cls,
                f"it keeps {name!r} in its parameter groups, and shards compute another value than whole tensors",
            )
    if not _close(whole.end, torch.cat([part.end for part in parts])):
        held = torch.cat([_with_one_optimizer(cls, options, *cuts) for cuts in _CUTS])
        if _close(whole.end, held):
            raise _refusal(cls, _IMPURE)
        raise _refusal(cls, "its update of one element depends on others, or on the shape or size of the tensor")


_IMPURE = (
    "it is not a pure function of parameter, gradient and state: it stores something outside of self.state[parameter] "
    "and the numbers in its groups, or creates its state from the first gradient"
)


def _with_one_optimizer(cls: Class, options: Mapping[str, Any], *cuts: int) -> Tensor:
    """The parts again, updated by one optimizer object for all steps."""
    params = _cut(_start(), cuts)
    optimizer = cls(params, **options)
    for step in range(_NUM_STEPS):
        for param, grad in zip(params, _cut(_gradient(step), cuts), strict=True):
            param.grad = grad
        optimizer.step()
    return torch.cat(params)


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two results are equal up to float64 rounding, relative to the distance from the start."""
    moved, size = (float(x.abs().nan_to_num(0.0, 0.0).max()) for x in (a - _start(), a))
    return torch.allclose(a, b, rtol=0, atol=1e-7 * moved + 1e-13 * size, equal_nan=True)


class Refusal(Exception):  # noqa: N818
    """Raised by a probe itself, unlike errors of the class."""


def refusal(cls: Class, reason: str, what: str = "shards", advice: str = "") -> Refusal:
    """Why ``cls`` cannot update ``what``, and what to do instead."""
    return Refusal(f"optimizer: {cls.__name__} cannot update {what}: {reason}. {advice or _BY_HAND}")


def _refusal(cls: Class, reason: str) -> Refusal:
    return refusal(cls, reason, advice="Pass whole=True: then one rank updates each parameter as a whole.")


_BY_HAND = "Gather what it needs, update whole tensors, and shard() the result."


class _Combinations(TorchDispatchMode):
    """Records operators whose result has fewer elements than a whole tensor that they take."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not name.startswith("new_") and name not in self.found and _combines(args, result):
            self.found.append(name)
        return result


_WHOLE = {prod(shape) for shape in (*_SHAPES, *_SMALL_SHAPES) if prod(shape) > 5}


def _combines(args: Sequence[Any], result: Any) -> bool:
    if isinstance(result, (list, tuple)) and args and isinstance(args[0], (list, tuple)):  # one result for each operand
        return any(_is_less(r, [x]) for r, x in zip(result, args[0], strict=False))
    return any(_is_less(r, list(_tensors(args))) for r in _tensors([result]))


def _tensors(values: Any) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def _is_less(result: Any, operands: Sequence[Any]) -> bool:
    sizes = [x.numel() for x in operands if isinstance(x, Tensor) and x.numel() in _WHOLE]
    return isinstance(result, Tensor) and bool(sizes) and result.numel() < max(sizes)
