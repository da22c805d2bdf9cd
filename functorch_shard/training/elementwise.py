"""Test whether an optimizer class updates shards as it updates whole tensors.

The class runs in two ways: on whole tensors of several shapes and sizes, and on uneven flat parts of the same elements,
as on independent ranks, with only parameter, gradient and state kept between steps. Sizes are above the thresholds of
classes that quantize or factor large tensors only, and there are more steps than warm-ups and lookaheads take.
Dependences that appear for some values only, such as the projection of a gradient that is orthogonal to its parameter,
are found in the operators: one whose result has fewer elements than the tensor combines elements.
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
from .optimizer_step import Class, Group, update
from .trials import apart, find_traits, on_host, scattered

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
    options = on_host(options)
    try:
        with apart():
            whole, parts = _whole(cls, options), _parts(cls, options)
    except Exception as error:
        raise AssertionError(f"{cls.__name__} is not elementwise: {error}") from error
    moved, size = (float(x.abs().nan_to_num(0.0, 0.0).max()) for x in (whole - _start(), whole))
    if not torch.allclose(whole, parts, rtol=0, atol=1e-7 * moved + 1e-13 * size, equal_nan=True):
        reason = "parts of tensors are updated otherwise than whole ones: by elements of others, by the shape or size, "
        reason += "or by what it stores outside of self.state[parameter] and the numbers in its groups"
        raise AssertionError(f"{cls.__name__} is not elementwise: {reason}")


def _whole(cls: Class, options: dict[str, Any]) -> Tensor:
    params = [torch.nn.Parameter(x.clone().reshape(s)) for x, s in zip(_start().split(_SIZES), _SHAPES, strict=True)]
    optimizer = cls(params, **options)
    for step in range(_NUM_STEPS):
        for param, grad in zip(params, _gradient(step).split(_SIZES), strict=True):
            param.grad = grad.clone().reshape(param.shape)
        with _NoCombinations():
            optimizer.step()
    return torch.cat([x.detach().flatten() for x in params])


def _parts(cls: Class, options: dict[str, Any]) -> Tensor:
    traits = find_traits(cls, options)
    params = [_start()[a:b].clone() for a, b in pairwise(_CUTS)]
    groups = [Group(x, x, traits.begin(cls, options, x), options) for x in params]
    for step in range(_NUM_STEPS):
        for group, (a, b) in zip(groups, pairwise(_CUTS), strict=True):
            update(cls, [replace(group, grad=_gradient(step)[a:b].clone())], ())
    return torch.cat(params)


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
