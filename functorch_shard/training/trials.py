"""What an optimizer class keeps for a parameter, found by trial steps: torch declares it nowhere."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor

from ..storage.memory_kind import memory_kind_of
from ..torch_internals.autograd import outside_transforms, untraced, without_compiling
from .optimizer_step import (
    ELEMENTWISE,
    IMPLEMENTATIONS,
    NUMBER,
    NUMBERS,
    Class,
    Group,
    Leaves,
    Options,
    Rows,
    State,
    as_leaves,
    implementation,
    take_step,
    update,
)

_TRIAL_STEPS = 12  # more than warm-ups and lookaheads take


@dataclass(frozen=True)
class Traits:
    """What a class keeps with given options.

    Args:
        names: of its state for a parameter, with the numbers of its parameter groups that steps change.
        known: whether the state before the first step is known; otherwise the first step creates it.
    """

    names: tuple[str, ...]
    known: bool

    @property
    def numbers(self) -> list[str]:
        return [name for name in self.names if name.startswith(NUMBER)]

    def begin(self, cls: Class, options: Options, like: Tensor) -> State:
        """The state before the first step for a parameter like this one, as far as it is known."""
        return first_values(cls, options, self.numbers, like) if self.known else dict.fromkeys(self.numbers)


def find_traits(cls: Class, options: Options) -> Traits:
    """Return what ``cls`` keeps with ``options``, found by a dozen steps on four elements.

    Raises:
        TypeError: it keeps what is not a tensor of the parameter's shape, a number or a string, or changes its options.
    """
    options = on_host(options)
    with apart():
        param = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        grads = [[torch.linspace(-1, i % 3, 4, dtype=torch.float64)] for i in range(_TRIAL_STEPS)]
        optimizer, numbers = take_steps(cls, options, [param], grads)
        kept = optimizer.state[param]
        odd = [f"{name!r} is a {type(x).__name__}" for name, x in kept.items() if not _fits(x, param)]
        if odd:
            raise refusal(cls, f"its state cannot be sharded like its parameter: {', '.join(odd)}")
        return Traits((*kept, *numbers), begins_as_known(cls, options, numbers, scattered((4,), 0)))


def _fits(x: Any, param: Tensor) -> bool:
    tensor = type(x) in (Tensor, torch.nn.Parameter) and x.shape in ((), param.shape)
    return tensor or x is None or isinstance(x, (*NUMBERS, str))


def take_steps(
    cls: Class, options: Options, params: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> tuple[torch.optim.Optimizer, list[str]]:
    """Take a step with each of ``grads``; return the optimizer, and the numbers in its group that steps have changed.

    A class that changes its own options is refused.
    """
    optimizer = cls([*params], **options)
    after = optimizer.param_groups[0]
    before = dict(after)
    for each in grads:
        for param, x in zip(params, each, strict=True):
            param.grad = x
        optimizer.step()
    names = [
        name
        for name, x in after.items()
        if isinstance(x, NUMBERS) and not (type(x) is type(before.get(name)) and x == before[name])
    ]
    if own := [name for name in names if name in option_names(cls)]:
        raise refusal(cls, f"it changes its own options ({', '.join(own)}), and here options are arguments")
    return optimizer, [NUMBER + name for name in names]


def take_steps_apart(
    cls: Class, options: Options, params: Sequence[Tensor], grads: Sequence[Sequence[Tensor]], states: Sequence[State]
) -> None:
    """Take a step with each of ``grads``, in place, each parameter by itself and with nothing but its state kept."""
    groups = [Group(x, x, state, options) for x, state in zip(params, states, strict=True)]
    for each in grads:
        for group, grad in zip(groups, each, strict=True):
            update(cls, [replace(group, grad=grad)], ())


def option_names(cls: Class) -> list[str]:
    """The options of ``cls``: the parameters of its constructor without the first, ``"**"`` if it takes any."""
    _, *parameters = inspect.signature(cls).parameters.values()
    return ["**" if x.kind is x.VAR_KEYWORD else x.name for x in parameters]


_WHOLE = "ass whole=True: then one rank updates each parameter as a whole."
_NEVER = {
    torch.optim.LBFGS: "its step needs closure, and here a step gets gradients and no loss",
    torch.optim.SparseAdam: "it takes sparse gradients, and here they are dense",
}
_ONLY_WHOLE = {
    torch.optim.Adafactor: "its state is of rows and columns, and a shard has parts of them",
    torch.optim.Muon: "it makes whole matrices orthogonal, and a shard is a part of one",
}


def check_class(cls: type[torch.optim.Optimizer], elementwise: bool, whole: bool) -> None:
    """Raise unless a step of ``cls`` is a function of parameter, gradient and state, of each element or whole."""
    if cls in _NEVER:
        raise refusal(cls, _NEVER[cls])
    if callable(getattr(cls, "train", None)) and callable(getattr(cls, "eval", None)):
        reason = "it has a train mode and an eval mode with different parameters, and a pure step has no modes"
        raise refusal(cls, reason)
    if whole:
        return
    if cls in _ONLY_WHOLE:
        raise refusal(cls, _ONLY_WHOLE[cls], advice=f"P{_WHOLE}")
    if not elementwise and cls not in ELEMENTWISE:
        reason = "it is not a class of torch.optim that is known to update each element by itself"
        check = f"fs.testing.check_elementwise({cls.__name__}, ...)"
        raise refusal(cls, reason, f"If it does, pass elementwise=True, which {check} tests; else p{_WHOLE}")


class _FirstValues(dict[str, Any]):
    """A state that keeps a copy of the first value of each entry: its class makes it, and then updates it in place."""

    def __init__(self, numbers: Sequence[str]) -> None:
        super().__init__(dict.fromkeys(numbers))
        self.first: State = {}

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name not in self.first:
            self.first[name] = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


def first_values(cls: Class, options: Options, numbers: Sequence[str], like: Tensor) -> State:
    """The state that a step of ``cls`` begins with for a parameter like this one, with ``numbers`` of its groups."""
    state, param = _FirstValues(numbers), torch.zeros_like(like)
    optimizer = cls([param], **{**implementation(cls, options, [param], option_names(cls)), **options})
    entries = dict(optimizer.param_groups[0])
    take_step(optimizer, [Group(param, scattered(like.shape, 3).to(like), state, options)], {})
    return {**state.first, **{name: entries.get(name.removeprefix(NUMBER)) for name in numbers}}


def start(cls: Class, options: Options, traits: Traits, like: Tensor) -> Leaves:
    """The state before the first step, for parameters of the dtype and on the device of ``like``; the same everywhere.

    It is found on four elements, so that no memory is needed for a step on the parameters.
    """
    with apart():
        four = torch.zeros(4, dtype=like.dtype, device="cpu" if like.is_meta else like.device)
        return as_leaves(traits.begin(cls, options, four))


def start_like(param: Tensor, x: Any, rows: Rows) -> Any:
    """The state ``x`` of four elements for a parameter; ``None`` if the first step creates it."""
    if not isinstance(x, Tensor):
        return x
    if x.ndim == 0:
        return torch.full(rows, x.item(), dtype=x.dtype, device=x.device)
    return memory_kind_of(param).put(torch.full_like(param, x[0].item(), dtype=x.dtype))


def begins_as_known(cls: Class, options: Options, numbers: Sequence[str], start: Tensor) -> bool:
    """Whether a step from the first values is the first step from nothing, with any parameter, gradient and rate.

    It is not where the first step makes the state of its gradient (SGD), or of its rate: ASGD and Rprop.
    """
    known = option_names(cls)
    for rate in ({}, {"lr": 0.75}) if "lr" in known else ({},):
        begun = first_values(cls, options, numbers, start)
        if any(constant(x) is None for x in leaves_of(begun)):
            return False
        groups = [
            Group(start.clone(), scattered(start.shape, 5).to(start), state, {**options, **rate})
            for state in (dict.fromkeys(numbers), begun)
        ]
        for group in groups:
            update(cls, [group], known)
        if not _alike(*((group.param, group.state) for group in groups)):
            return False
    return True


def constant(x: Any) -> Any:
    """The value of all elements of a tensor, ``None`` if there are several; or the number that it is."""
    if not isinstance(x, Tensor) or not x.numel():
        return 0 if isinstance(x, Tensor) else x
    return x.flatten()[0].item() if bool((x == x.flatten()[0]).all()) else None


def leaves_of(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree)


def _alike(a: Any, b: Any) -> bool:
    (ours, one), (theirs, other) = optree.tree_flatten(a), optree.tree_flatten(b)
    return one == other and all(map(_close, ours, theirs))


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, str):
        return a == b
    x, y = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-3, atol=1e-6, equal_nan=True)


def scattered(shape: Sequence[int], seed: int) -> Tensor:
    """Numbers between -1 and 1 other than 0, without a random generator."""
    return ((torch.arange(prod(shape), dtype=torch.float64) + 0.37 * (seed + 1)) * 12.9898).sin().reshape(shape)


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
    return {name: _plain(x) for name, x in options.items() if name not in IMPLEMENTATIONS}


def _plain(x: Any) -> Any:
    """A float32 tensor as the number that it is: each implementation rounds it otherwise."""
    if type(x) in (tuple, list):
        return type(x)(_plain(each) for each in x)
    return x.item() if isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta else x
