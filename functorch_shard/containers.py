"""Containers that are not registered with optree: a call opens them temporarily.

Dataclasses, ``UserDict`` (transformers' ``BatchEncoding``) and types that are registered in ``torch.utils._pytree``
(``ModelOutput``): :func:`opened` replaces each one that holds a tensor by an :class:`Opened` node, and unflattening
that node makes the container again. One without a tensor stays a leaf.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import optree
import torch
from torch import Tensor

from .errors import reject
from .torch_internals.tensors import GLOBAL_NAMESPACE, torch_node

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_DEPTH = 3  # levels of attributes that are searched for a tensor
KNOWN = (
    "Supported containers are those of optree, dataclasses, UserDict, and types that are registered with "
    "torch.utils._pytree.register_pytree_node. Use one of them, or pass its tensors directly."
)


class Static:
    """Base of objects that are options and not data, such as a layout: never opened, passed through as they are."""


@dataclass(frozen=True)
class _Form:
    """A container without its children; equal forms can be combined child by child."""

    cls: type
    entries: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any] = field(compare=False)


@dataclass
class Opened:
    """A container as a node of optree; unflattening it makes the container again."""

    children: Sequence[Any]
    form: _Form


_register: Any = optree.register_pytree_node  # typed for collections only
_register(
    Opened,
    lambda node: (node.children, node.form, node.form.entries),
    lambda form, children: form.rebuild(list(children)),
    namespace=GLOBAL_NAMESPACE,
)


def opened(tree: Any) -> Any:
    """Open the unregistered containers of ``tree`` that hold a tensor."""
    if not _others(optree.tree_leaves(tree, none_is_leaf=True)):
        return tree

    def open_leaf(x: Any) -> Any:
        if isinstance(x, (Tensor, Opened)) or type(x) in _PLAIN or (node := _take_apart(x)) is None:
            return x
        node.children = [opened(child) for child in node.children]
        return node if any(map(_has_tensor, node.children)) else x

    return optree.tree_map(open_leaf, tree, is_leaf=lambda x: type(x) is Opened, none_is_leaf=True)


def opaque_problem(x: Any, matters: Callable[[Any], bool] = lambda _: True) -> str:
    """Describe the tensors or arrays inside of a leaf of an opened tree; empty if there are none.

    Modules, other callables and optimizers are not data, and not searched. Tensors for which ``matters`` is false are
    ignored.
    """
    if isinstance(x, (Tensor, *_PLAIN)):
        return ""
    if is_array(x):
        return f"a {type(x).__name__}, which is not a tensor: convert it with torch.as_tensor" if matters(x) else ""
    return f"a {type(x).__name__}, which is not a supported container, and holds tensors" if _holds(x, matters) else ""


def refuse_opaque(verb: str, tree: Any, root: str, matters: Callable[[Any], bool] = lambda _: True) -> None:
    """Raise for all leaves of an opened tree that have an :func:`opaque_problem`."""
    if not _others(optree.tree_leaves(tree, none_is_leaf=True)):
        return
    paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True)
    found = [(path, opaque_problem(x, matters)) for path, x in zip(paths, leaves, strict=True)]
    problems = [f"{root}{place(path)}: {problem}" for path, problem in found if problem]
    reject(verb, problems, KNOWN, TypeError)


def place(path: Iterable[Any]) -> str:
    """The path of a leaf: ``[0]['x']['mask']``."""
    return "".join(f"[{entry!r}]" for entry in path)


def _others(leaves: Sequence[Any]) -> list[Any]:
    """The leaves that are neither tensors nor plain values."""
    return [x for x in leaves if type(x) not in _PLAIN and not isinstance(x, Tensor)]


def _take_apart(x: Any) -> Opened | None:
    """A container as a node, or ``None`` for anything else."""
    if isinstance(x, (torch.nn.Module, Static, type)):
        return None
    if node := torch_node(type(x)):
        children, context = node.flatten_fn(x)
        entries = tuple(x) if isinstance(x, Mapping) and len(x) == len(children) else tuple(range(len(children)))
        return Opened(children, _Form(type(x), entries, lambda new: node.unflatten_fn(new, context)))
    if isinstance(x, UserDict):
        names = ("data",)
    elif is_dataclass(x) and not isinstance(x, Mapping):
        names = tuple(part.name for part in fields(x) if hasattr(x, part.name))
    else:
        return None
    if any(_has_tensor(value) for name, value in attributes_of(x).items() if name not in names):
        return None  # what __post_init__ computed from the fields would not change

    def rebuild(values: Sequence[Any]) -> Any:
        made = copy(x)  # not by __init__, which may check its arguments
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return Opened([getattr(x, name) for name in names], _Form(type(x), names, rebuild))


def _holds(x: Any, matters: Callable[[Any], bool], depth: int = _DEPTH) -> bool:
    """Whether an object has a tensor that ``matters`` in its attributes or items; callables are not searched."""
    if isinstance(x, Tensor) or is_array(x):
        return matters(x)
    if not depth or callable(x) or isinstance(x, (*_PLAIN, Static, ModuleType, torch.optim.Optimizer)):
        return False
    items = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple)) else ()
    inside: Any = [*attributes_of(x).values(), *items]
    return any(_holds(leaf, matters, depth - 1) for leaf in optree.tree_leaves(inside, none_is_leaf=True))


def attributes_of(x: Any) -> dict[str, Any]:
    """The attributes of an object by name, those in slots too."""
    declared = [getattr(cls, "__slots__", ()) for cls in type(x).__mro__]
    slots = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    named = {name: getattr(x, name) for name in slots if not name.startswith("__") and hasattr(x, name)}
    return named | getattr(x, "__dict__", {})


def is_hashable(x: Any) -> bool:
    """Whether ``x`` and what it holds can be the key of a dict: a tuple with a list in it cannot."""
    with suppress(TypeError):
        return isinstance(hash(x), int)
    return False


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array of another library; arrays without dims count as numbers."""
    return not isinstance(x, Tensor) and hasattr(x, "__dlpack__") and getattr(x, "ndim", 0) > 0


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(x, Tensor) for x in optree.tree_leaves(tree, none_is_leaf=True))


def filled_variables(fn: FunctionType) -> dict[str, Any]:
    """Return the variables of the closure of ``fn`` that have a value, by name."""
    found: dict[str, Any] = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found


def _names(code: CodeType) -> Iterator[str]:
    """The names of what is not a local variable, in the functions inside too."""
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _names(inside)


_REACHED = (Tensor, torch.nn.Module, torch.Generator)


def reached(fn: Any, depth: int = 0, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """The tensors, modules and generators that ``fn`` reaches besides its arguments, with the names of its variables.

    ``depth``: of how many objects inside of each other the attributes are searched.
    """
    seen = set() if seen is None else seen
    if isinstance(fn, _REACHED):
        yield name, fn
    elif not isinstance(fn, (Static, torch.optim.Optimizer, type, ModuleType)) and id(fn) not in seen:
        seen.add(id(fn))
        for each, value, inside in _inside(name, fn, depth):
            yield from reached(value, inside, each, seen)


def _inside(name: str, x: Any, depth: int) -> Iterator[tuple[str, Any, int]]:
    """What is in ``x``, with its name, and how many objects inside of each other are searched there."""
    if isinstance(x, FunctionType):
        defaults = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        named = [*filled_variables(x).items(), *(("a default", value) for value in defaults)]
        yield from ((variable, value, depth) for variable, value in named)
        for variable in dict.fromkeys(name for name in _names(x.__code__) if name in x.__globals__):
            value = x.__globals__[variable]
            is_leaf = isinstance(value, _REACHED)
            if is_leaf or (value.__globals__ is x.__globals__ if isinstance(value, FunctionType) else depth):
                yield variable, value, depth
    elif isinstance(x, MethodType):
        yield from (("self", x.__self__, depth), (name, x.__func__, depth))
    elif isinstance(x, partial):
        yield from ((name, each, depth) for each in (x.func, x.args, x.keywords))
    else:
        leaves = optree.tree_leaves(opened(x), none_is_leaf=True)
        if len(leaves) != 1 or leaves[0] is not x:
            found = (x for x in leaves if isinstance(x, (Tensor, torch.Generator)) or hasattr(x, "__dict__"))
            yield from ((name, leaf, depth) for leaf in found)
        elif depth:
            yield from ((f"{name}.{attribute}", y, depth - 1) for attribute, y in getattr(x, "__dict__", {}).items())
