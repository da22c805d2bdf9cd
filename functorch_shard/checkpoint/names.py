"""Flattens trees into named leaves, with the names of torch's own state dicts.

Note [Names]: a name joins the entries of a path by dots, as ``torch.distributed.checkpoint`` does for a state dict:
``{"model": params}`` has the names ``model.<parameter>``. There are two exceptions. The state of an optimizer, a dict
of ``Sharded`` below the top, is named parameter by parameter, ``optim.state.<parameter>.exp_avg``, as in
``get_optimizer_state_dict``. And the parts of a tuple, ``(trainable, frozen)`` or ``(params, buffers)``, form one
dict, as in ``gather``: ``{"model": (params, buffers)}`` has the names of the module's state dict. Any other tuple with
tensors in it is a list; torch, which writes a tuple as one value, does not find its tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from ..layout.trees import Sharded
from ..sharding.lazy_tensor import Lazy

Path = tuple[str | int, ...]
_LONGEST_INT = 2039  # bits; a pickle stores the length of such an int in one byte
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Leaf(NamedTuple):
    """A value and its path; in a ``Sharded``, a parameter's name is between ``before`` and ``after``."""

    value: Any
    before: Path
    after: Path = ()

    def path(self, *parameter: str) -> Path:
        return (*self.before, *parameter, *self.after)

    def paths(self, parameter: str) -> tuple[Path, ...]:
        """The paths of a parameter of a ``Sharded``: a tied one has several."""
        return tuple(map(self.path, (parameter, *self.value.layout.aliases_of.get(parameter, ()))))


def dotted(path: Path) -> str:
    """The name of a path; ``"the tree"`` for the empty one."""
    return ".".join(map(str, path)) or "the tree"


def leaves_of(tree: Any) -> list[Leaf]:
    """List the leaves of a tree: ``Sharded``, tensors, and plain values."""
    found: list[Leaf] = []
    _visit(tree, (), found.append)
    return found


def with_values(tree: Any, values: Iterator[Any]) -> Any:
    """Rebuild ``tree`` with other values, in the order of :func:`leaves_of`."""
    return _visit(tree, (), lambda _: next(values))


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a leaf's value."""
    values = value.values() if isinstance(value, Sharded) else [value]
    return [x for x in values if isinstance(x, Tensor)]


def plain_problem(value: Any) -> str:
    """Why ``torch.load(weights_only=True)`` cannot read ``value`` back; empty if it can."""
    if type(value) is bytes and not value:
        return "got b'', which torch cannot read back; use None"
    if type(value) is int and value.bit_length() > _LONGEST_INT:
        return f"got an int of {value.bit_length():,} bits, torch reads back {_LONGEST_INT:,}; use str(value)"
    if isinstance(value, (list, tuple, set)) and type(value) in (list, tuple, set):
        return next(filter(None, map(plain_problem, value)), "")
    if isinstance(value, dict) and type(value) is dict:
        return next(filter(None, (plain_problem(x) for pair in value.items() for x in pair)), "")
    return "" if type(value) in _PLAIN else f"got a {type(value).__name__}"


def tensor_problem(x: Tensor) -> str:
    """Why ``x`` cannot be read back as it is, from a file that one rank writes; empty if it can."""
    if type(x) not in (Tensor, nn.Parameter, Lazy):
        return f"got a {type(x).__name__}, expected a plain tensor"
    if x.is_quantized or x.is_nested or x.layout != torch.strided:
        kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout)
        return f"got a tensor that is {kind}, expected a plain one"
    return "without values, on the meta device" if x.is_meta else ""


def twice(names: Iterator[str]) -> list[str]:
    """Names that several leaves have, as problems."""
    return [f"{name!r}: {count} leaves have this name" for name, count in Counter(names).items() if count > 1]


def _visit(x: Any, path: Path, make: Callable[[Leaf], Any]) -> Any:
    if _is_optimizer_state(x, path):
        base = path if path[-1] == "state" else (*path, "state")
        return {name: make(Leaf(tree, base, (name,))) for name, tree in x.items()}
    if _is_leaf(x):
        return make(Leaf(x, path))
    children, metadata, entries, rebuild = optree.tree_flatten_one_level(x, none_is_leaf=True)
    inside = path if _is_union(x) else None
    made = [
        _visit(child, (*path, _entry(entry, x)) if inside is None else inside, make)
        for entry, child in zip(entries, children, strict=True)
    ]
    return rebuild(metadata, made)


def _entry(entry: Any, container: Any) -> str | int:
    """Ints are positions in a list, keys of dicts are strings, as in torch.distributed.checkpoint."""
    return entry if isinstance(entry, int) and not isinstance(container, Mapping) else str(entry)


def _is_optimizer_state(x: Any, path: Path) -> bool:
    return bool(path) and type(x) is dict and bool(x) and all(isinstance(tree, Sharded) for tree in x.values())


def _is_union(x: Any) -> bool:
    return type(x) is tuple and bool(x) and all(isinstance(part, (Sharded, Mapping)) or _is_union(part) for part in x)


def _is_leaf(x: Any) -> bool:
    """Dicts are always entered, other containers where they contain tensors or dicts, as in torch's format."""
    if isinstance(x, (Sharded, Tensor)) or optree.tree_is_leaf(x, none_is_leaf=True):
        return True
    return not isinstance(x, Mapping) and not any(
        map(_is_worth_a_name, optree.tree_flatten_one_level(x, none_is_leaf=True)[0])
    )


def _is_worth_a_name(x: Any) -> bool:
    return isinstance(x, (Tensor, Sharded, Mapping)) or not _is_leaf(x)
