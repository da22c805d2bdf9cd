"""Test whether an optimizer class updates shards as it updates whole tensors.

The class runs on whole tensors of several shapes, and on uneven flat parts of the same elements, with only parameter,
gradient and state kept between steps. Sizes are above the thresholds of classes that quantize or factor large tensors,
and steps are more than warm-ups take. Dependences that appear for some values only are found in the operators: one
whose result has fewer elements than the tensor combines elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..torch_internals.autograd import TorchDispatchMode
from .optimizer_step import Group, update
from .trials import Class, Options, apart, on_host, scattered, state_of, take_steps

_SHAPES = ((160, 130), (8192,), (4, 3, 3, 3), (5,), ())
_SIZES = [*map(prod, _SHAPES)]
_CUTS = (0, 4097, 8290, 25377, sum(_SIZES))  # odd sizes, boundaries inside a row
_NUM_STEPS = 12


def check_elementwise(cls: type[torch.optim.Optimizer], **options: Any) -> None:
    """Raise unless ``cls`` updates each element by itself, so that ``fs.optimizer(cls, elementwise=True)`` is right.

    Args:
        cls: a subclass of ``torch.optim.Optimizer``.
        options: those that it is trained with, also those of single steps.

    Raises:
        AssertionError: it does not; the message has the reason.

    Cost:
        A few dozen steps on 30,000 elements on the CPU, less than a tenth of a second.

    Example:
        >>> check_elementwise(torch.optim.AdamW, lr=1e-3)
        >>> check_elementwise(torch.optim.Adafactor)
        Traceback (most recent call last):
        AssertionError: Adafactor is not elementwise: it calls linalg_vector_norm, whose result has fewer elements
    """
    options, start = on_host(options), _start()
    whole = [torch.nn.Parameter(x.clone().reshape(s)) for x, s in zip(start.split(_SIZES), _SHAPES, strict=True)]
    parts = [start[a:b].clone() for a, b in pairwise(_CUTS)]
    grads = [_gradient(step) for step in range(_NUM_STEPS)]
    of_whole = [[x.reshape(s) for x, s in zip(g.clone().split(_SIZES), _SHAPES, strict=True)] for g in grads]
    of_parts = [[g[a:b].clone() for a, b in pairwise(_CUTS)] for g in grads]
    try:
        with apart(), _NoCombinations():
            take_steps_in_two_ways(cls, options, (whole, of_whole), (parts, of_parts))
            state_of(cls, options, start)
    except Exception as error:
        raise AssertionError(f"{cls.__name__} is not elementwise: {error}") from error
    together, each = torch.cat([x.detach().flatten() for x in whole]), torch.cat(parts)
    moved, size = (float(x.abs().nan_to_num(0.0, 0.0).max()) for x in (together - start, together))
    if not torch.allclose(together, each, rtol=0, atol=1e-7 * moved + 1e-13 * size, equal_nan=True):
        reason = "parts of tensors are updated otherwise than whole ones: by elements of others, by the shape or size, "
        reason += "or by what it stores outside of self.state[parameter] and the numbers in its groups"
        raise AssertionError(f"{cls.__name__} is not elementwise: {reason}")


Steps = tuple[Sequence[Tensor], Sequence[Sequence[Tensor]]]  # parameters, and their gradients of each step


def take_steps_in_two_ways(cls: Class, options: Options, together: Steps, each: Steps) -> None:
    """Take steps with one object for all, and with a new one for each parameter and step: only its state is kept."""
    _, numbers = take_steps(cls, options, *together)
    groups = [Group(x, x, dict.fromkeys(numbers), options) for x in each[0]]
    for grads in each[1]:
        for group, grad in zip(groups, grads, strict=True):
            update(cls, [replace(group, grad=grad)], ())


def _start() -> Tensor:
    x = scattered((sum(_SIZES),), 0)
    return x + 1.5 * x.roll(1).sign()


def _gradient(step: int) -> Tensor:
    """Gradients of a size that varies with step and element, some of them zero."""
    x = scattered((sum(_SIZES),), 2).roll(977 * step)
    return (x * torch.linspace(0.5, 2.0, len(x), dtype=x.dtype) * (0.1 + step * 7 % 5)).where(x.abs() > 0.05, 0.0)


class _NoCombinations(TorchDispatchMode):
    """Raises at an operator whose result has fewer elements than a whole tensor that it takes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        several = isinstance(result, (list, tuple)) and args and isinstance(args[0], (list, tuple))
        pairs = zip(result, args[0], strict=False) if several else [(result, args)]  # foreach: one result for each
        if not name.startswith("new_") and any(_is_less(x, operands) for x, operands in pairs):
            raise AssertionError(f"it calls {name}, whose result has fewer elements")
        return result


def _is_less(result: Any, operands: Any) -> bool:
    operands = operands if isinstance(operands, Sequence) else [operands]
    sizes = [x.numel() for x in operands if isinstance(x, Tensor) and x.numel() in _SIZES and x.numel() > 5]
    return isinstance(result, Tensor) and bool(sizes) and result.numel() < max(sizes)
