"""What is known of optimizer classes, by name or by trial steps: torch declares nowhere what one keeps."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, optim

from ..torch_internals.autograd import outside_transforms, untraced, without_compiling

Class = type[torch.optim.Optimizer]
Options = Mapping[str, Any]
Leaves = dict[str, Any]  # of a buffer, by name
# The number, dtype, and for a scalar the device, of an entry of state before the first step.
First = tuple[complex, torch.dtype, torch.device | None]
NUMBERS = bool, int, float
NUMBER = "group."  # before the names of numbers that a class keeps in its parameter groups
IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")

# Their kernels write to no gradient, read in their sources, except that of SGD with Nesterov momentum.
_OF_AVERAGES = (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adadelta)
LEAVE_GRADIENTS = (optim.SGD, optim.ASGD, *_OF_AVERAGES)
ELEMENTWISE = (*LEAVE_GRADIENTS, optim.Adamax, optim.Rprop, optim.Adagrad)
_WHOLE = (optim.Adafactor, optim.Muon)
_BEGIN_WITH_NUMBERS = (*_OF_AVERAGES, optim.Adamax, optim.Adagrad, *_WHOLE)
_TRIAL_STEPS = 12  # more than warm-ups and lookaheads take


def state_of(cls: Class, options: Options, like: Tensor) -> dict[str, First | None]:
    """Return what ``cls`` keeps for a parameter like this one before the first step, found on four elements.

    ``None`` is what the first step makes: Note [First values]. State of another shape or type is refused.
    """
    options = on_host(options) if like.is_meta else options
    param = torch.zeros(4, dtype=like.dtype, device="cpu" if like.is_meta else like.device)
    grads = [[scattered(param.shape, i).to(param)] for i in range(1 if cls in ELEMENTWISE else _TRIAL_STEPS)]
    optimizer, numbers = take_steps(cls, options, [param], grads)
    kept = optimizer.state[param]
    odd = [f"{name!r} is a {type(x).__name__}" for name, x in kept.items() if not _fits(x, param)]
    if odd:
        raise refusal(cls, f"its state cannot be sharded like its parameter: {', '.join(odd)}")
    begun = dict[str, First | None].fromkeys([*kept, *numbers])
    for name, x in kept.items():
        if (value := first_value(cls, options, name)) is not None:
            both = complex(value, value) if x.is_complex() else value  # of Adagrad, in its view as real numbers
            begun[name] = both, x.dtype, None if x.ndim else x.device
    return begun


def first_value(cls: Class, options: Options, name: str) -> Any:
    """Return the number that ``cls`` begins an entry of its state with; ``None`` if its first step makes it.

    Note [First values]: classes of ``torch.optim`` are known by name. SGD makes momentum of its first gradient, ASGD
    and Rprop make state of the learning rate. What classes from elsewhere begin with is left to their first step.
    """
    if cls not in _BEGIN_WITH_NUMBERS:
        return None
    return {"sum": options.get("initial_accumulator_value", 0), "mu_product": 1}.get(name, 0)


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


def option_names(cls: Class) -> list[str]:
    """The options of ``cls``: the parameters of its constructor without the first."""
    return [*inspect.signature(cls).parameters][1:]


def check_class(cls: Class, elementwise: bool, whole: bool) -> None:
    """Raise unless a step of ``cls`` is a function of parameter, gradient and state, of each element or whole."""
    if callable(getattr(cls, "train", None)) and callable(getattr(cls, "eval", None)):
        raise refusal(
            cls, "it has a train mode and an eval mode with different parameters, and a pure step has no modes"
        )
    if not whole and (cls in _WHOLE or not (elementwise or cls in ELEMENTWISE)):
        raise refusal(cls, "it is not known to update each element by itself", _DECLARE.format(cls=cls.__name__))


_DECLARE = (
    "If it does, pass elementwise=True, which fs.testing.check_elementwise({cls}, ...) tests; else pass whole=True: "
    "then one rank updates each parameter as a whole."
)


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
    modes = untraced(), outside_transforms(), torch.inference_mode(False), torch.no_grad(), torch.device("cpu")
    with ExitStack() as stack, without_compiling():
        for each in modes:
            stack.enter_context(each)
        yield


def on_host(options: Options) -> dict[str, Any]:
    """``options`` without those that select an implementation, which the CPU may not have."""
    return {name: x for name, x in options.items() if name not in IMPLEMENTATIONS}
