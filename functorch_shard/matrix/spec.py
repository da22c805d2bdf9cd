"""What an optimizer class keeps for a whole parameter, and whether it updates each parameter by itself.

Note [State of whole parameters]: what a class keeps for a parameter, nested lists and dicts included, is flattened into
named entries, ``"exp_avg"`` or ``"GG.0"``: tensors of any shape, and numbers. The entries of a shape are found by two
steps with numbers of that shape. Where torch's class is known to begin with zeros, state is zeros before the first
step. Otherwise the first step makes it (SGD's momentum, SOAP's eigenvectors, state of classes from elsewhere): then a
further entry, ``"owner.started"``, says whether it has, and until then entries are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import optree
import torch
from torch import Tensor

from ..training.elementwise import take_steps_in_two_ways
from ..training.optimizer_step import NUMBER_DTYPES, Group, update
from ..training.trials import (
    ELEMENTWISE,
    Class,
    Options,
    apart,
    first_value,
    on_host,
    option_names,
    refusal,
    scattered,
    take_steps,
)

STARTED = "owner.started"


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
    """What a class keeps for a parameter of one shape and dtype."""

    entries: tuple[Entry, ...]  # all of it, in the order of the leaves of treedef, then STARTED
    treedef: Any  # of {**state, **numbers of its parameter groups}
    numbers: tuple[str, ...]  # the names of the numbers that it keeps in its parameter groups
    known: bool  # whether the state before the first step is known


def find_spec(cls: Class, options: Options, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Spec:
    """Find what ``cls`` keeps for a parameter of this shape by two steps with numbers of the shape, Note above."""
    options, known_options = _with_rate(options), option_names(cls)
    with apart():
        start = scattered(shape, 0).to(device, dtype)
        grad = scattered(shape, 3).to(start)
        _, numbers = take_steps(cls, options, [torch.nn.Parameter(start.clone())], [[grad.clone()], [grad.clone()]])
        group = Group(start.clone(), grad, dict.fromkeys(numbers), options)
        update(cls, [group], known_options)
        entries, treedef = flattened(group.state, device)
    known = all(first_value(cls, options, entry.name) == 0 for entry in entries)
    started = [] if known else [Entry(STARTED, (), torch.bool, bool, device)]
    return Spec((*entries, *started), treedef, tuple(numbers), known)


def _with_rate(options: Options) -> Options:
    """``options`` with a learning rate other than 0, which a schedule may begin with."""
    rate = options.get("lr")
    return {**options, "lr": 1e-2} if isinstance(rate, (int, float, Tensor)) and not rate else options


def flattened(tree: Any, device: torch.device) -> tuple[tuple[Entry, ...], Any]:
    """The entries of a state, numbers on ``device``, and its structure."""
    paths, leaves, treedef = optree.tree_flatten_with_path(tree)
    entries = list[Entry]()
    for path, x in zip(paths, leaves, strict=True):
        tensor = isinstance(x, Tensor)
        form = (tuple(x.shape), x.dtype, Tensor, x.device) if tensor else ((), NUMBER_DTYPES[type(x)], type(x), device)
        entries.append(Entry(".".join(map(str, path)), *form))
    return tuple(entries), treedef


_SHAPES = ((6, 4), (4, 7), (5, 5))
_NUM_STEPS = 8


def check_whole(cls: Class, every: Sequence[Options]) -> None:
    """Raise unless ``cls`` updates each parameter by itself with ``every`` options, by one object for all or by many.

    With a small learning rate, estimates of a distance do not begin to grow, so that it is tried with 1 as well.
    """
    if cls in (*ELEMENTWISE, torch.optim.Muon, torch.optim.Adafactor):
        return
    rates = [{}, {"lr": 1.0}] if "lr" in option_names(cls) else [{}]
    reason = "its update of a parameter depends on others, or on more than its state and numbers of its groups"
    with apart():
        for options, rate in product(every, rates):
            together, each = ([torch.nn.Parameter(scattered(x, i)) for i, x in enumerate(_SHAPES)] for _ in range(2))
            tried = {**_with_rate(on_host(options)), **rate}
            take_steps_in_two_ways(cls, tried, (together, _gradients()), (each, _gradients()))
            pairs = zip(together, each, strict=True)
            if not all(torch.allclose(x, alone, rtol=1e-6, atol=1e-9, equal_nan=True) for x, alone in pairs):
                raise refusal(cls, reason)


def _gradients() -> list[list[Tensor]]:
    """About the same direction in each step, as estimates of a distance need it, of sizes that vary with parameters."""
    return [
        [(scattered(x, i + 3) + 0.3 * scattered(x, 7 * step + i)) * 10.0 ** (i - 1) for i, x in enumerate(_SHAPES)]
        for step in range(_NUM_STEPS)
    ]
