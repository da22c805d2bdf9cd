"""What a step reaches besides its arguments: tensors that it assigns, which no later call would do, and modules.

Found are attributes of objects whose methods are called, variables of closures and of the module, and what lists and
dicts there hold. Attributes of modules are not: what a forward leaves there is usually read in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import optree
import torch
from torch import Tensor, nn

from ..containers import Static, filled_variables, opened
from ..torch_internals.tensors import FakeTensor, identity_of_storage

_DEPTH = 2  # objects inside of each other whose attributes are searched
_IGNORED = (Static, torch.optim.Optimizer, type, ModuleType)


def memory_outside(fn: Callable[..., Any]) -> dict[int, list[tuple[str, Tensor]]]:
    """The tensors that ``fn`` reaches besides its arguments, with the names of their variables, by their memory."""
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in _reached("", fn, _DEPTH, set()):
        if type(x) in (Tensor, nn.Parameter, FakeTensor) and x.layout == torch.strided:
            found.setdefault(identity_of_storage(x), []).append((name, x))
    return found


def modules_outside(fn: Callable[..., Any]) -> list[nn.Module]:
    """The modules that ``fn`` reaches besides its arguments, and all inside of them."""
    found = (x for _, x in _reached("", fn, _DEPTH, set()) if isinstance(x, nn.Module))
    return list(dict.fromkeys(inner for x in found for inner in x.modules()))


def _reached(name: str, x: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The tensors and modules in ``x``, with the names of their variables."""
    if isinstance(x, (Tensor, nn.Module)):
        yield name, x
    elif not isinstance(x, _IGNORED) and id(x) not in seen:
        seen.add(id(x))
        for each, value, inside in _inside(name, x, depth):
            yield from _reached(each, value, inside, seen)


def _inside(name: str, x: Any, depth: int) -> Iterator[tuple[str, Any, int]]:
    """What is in ``x``, with its name, and how many objects inside of each other are searched there."""
    if isinstance(x, FunctionType):
        yield from ((variable, value, depth) for variable, value in filled_variables(x).items())
        for variable in dict.fromkeys(name for name in x.__code__.co_names if name in x.__globals__):
            value = x.__globals__[variable]
            if not isinstance(value, FunctionType) or value.__globals__ is x.__globals__:
                yield variable, value, depth
    elif isinstance(x, MethodType):
        yield from (("self", x.__self__, depth), (name, x.__func__, depth))
    elif isinstance(x, partial):
        yield from ((name, each, depth) for each in (x.func, x.args, x.keywords))
    else:
        leaves = optree.tree_leaves(opened(x), none_is_leaf=True)
        if len(leaves) != 1 or leaves[0] is not x:
            yield from ((name, leaf, depth) for leaf in leaves if isinstance(leaf, Tensor) or hasattr(leaf, "__dict__"))
        elif depth:
            yield from ((f"{name}.{attribute}", y, depth - 1) for attribute, y in getattr(x, "__dict__", {}).items())
