"""Test whether an optimizer class updates shards as it updates whole tensors.

It runs on whole tensors of several shapes, and on uneven flat parts of the same elements, with only parameter, gradient
and state kept between steps. Sizes are above the thresholds of classes that quantize or factor large tensors. An
operator whose result has fewer elements than a whole tensor shows a dependence that appears for some values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor

from ..torch_internals.autograd import TorchDispatchMode
from .optimizer_step import Group, update
from .trials import Class, Options, apart, on_host, scattered, state_of, take_steps

_SHAPES = ((160, 130), (8192,), (4, 3, 3, 3), (5,), ())
_SIZES = [*map(prod, _SHAPES)]
_CUTS = (0, 4097, 8290, 25377, sum(_SIZES))  # odd sizes, boundaries inside a row
_NUM_STEPS = 12  # more than warm-ups take


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
    options = on_host(options)
    x, grad = (scattered((sum(_SIZES),), seed) for seed in (0, 2))
    start, grad = x + 1.5 * x.roll(1).sign(), grad.where(grad.abs() > 0.05, 0.0)
    whole, parts = _whole_and_parts(start)
    whole = [*map(torch.nn.Parameter, whole)]  # what reads derivatives of gradients asks for them
    grads = [_whole_and_parts(grad.roll(977 * step) * (0.1 + step * 7 % 5)) for step in range(_NUM_STEPS)]
    try:
        with apart(), _NoCombinations():
            take_steps_in_two_ways(cls, options, (whole, [g for g, _ in grads]), (parts, [g for _, g in grads]))
            state_of(cls, options, start)
    except Exception as error:
        raise AssertionError(f"{cls.__name__} is not elementwise: {error}") from error
    together, each = torch.cat([x.detach().flatten() for x in whole]), torch.cat(parts)
    moved = float((together - start).abs().nan_to_num(0.0, 0.0).max())
    if not torch.allclose(together, each, rtol=1e-13, atol=1e-7 * moved, equal_nan=True):
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


def _whole_and_parts(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    whole = [part.clone().reshape(shape) for part, shape in zip(x.split(_SIZES), _SHAPES, strict=True)]
    return whole, [x[a:b].clone() for a, b in pairwise(_CUTS)]


class _NoCombinations(TorchDispatchMode):
    """Raises at an operator whose results have fewer elements than a whole tensor that it takes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        made, taken = (
            [x.numel() for x in optree.tree_leaves(tree) if isinstance(x, Tensor)] for tree in (result, args)
        )
        whole = [n for n in taken if n in _SIZES and n > 5]
        if made and whole and sum(made) < max(whole) and not name.startswith("new_"):
            raise AssertionError(f"it calls {name}, whose result has fewer elements")
        return result
