"""Which calls share a recording: those with the same structure, shapes, dtypes and settings of torch.

Besides its arguments a step may reach modules, whose modes are part of a recording, and tensors that it assigns, which
no later call would do. Found are attributes of objects whose methods are called, variables of closures and of the
module, and what lists and dicts there hold. Attributes of modules are not: what a forward leaves there is usually read
in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import optree
import torch
from torch import Tensor, nn

from ..containers import Static, attributes_of, is_hashable, opaque_problem, opened, reached
from ..layout.trees import is_node
from ..running import RUN
from ..storage.memory_kind import memory_kind_of
from ..torch_internals.tensors import FakeTensor, identity_of_storage

_DEPTH = 2  # objects inside of each other whose attributes are searched


@dataclass(frozen=True)
class Call:
    """The arguments of a call: their leaves, structure and keys of dicts, and the meshes of the trees among them."""

    leaves: Sequence[Any]
    treedef: Any
    keys: Sequence[Any]  # as inserted; structures with keys in another order are equal
    meshes: tuple[Any, ...]

    @property
    def inputs(self) -> list[Any]:
        """The leaves that are inputs of a graph: tensors, and floats, as tensors without dims."""
        return [x for x in self.leaves if is_traced(x)]


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call ``(*args, **kwargs)``."""
    tree, keys, meshes = opened((args, kwargs)), list[Any](), list[Any]()

    def visit(x: Any) -> bool:
        meshes.extend([x.layout.mesh] if is_node(x) else ())
        keys.extend(x if isinstance(x, dict) else ())
        return False

    leaves, treedef = optree.tree_flatten(tree, visit, none_is_leaf=True)
    return Call(leaves, treedef, tuple(keys), tuple(meshes))


def signature_of(call: Call, modules: Iterable[nn.Module]) -> Any:
    """Equal for calls that one recording serves: numbers of type ``float`` may differ, everything else is static.

    Meshes are compared by identity: layouts are equal on handles with other backends.
    """
    first: dict[int, tuple[int, int]] = {}
    leaves = tuple(_of_leaf(x, i, first) for i, x in enumerate(call.leaves))
    return call.treedef, call.keys, leaves, _settings(), call.meshes, tuple(x.training for x in modules)


def _of_leaf(x: Any, i: int, first: dict[int, tuple[int, int]]) -> Any:
    if isinstance(x, Tensor):
        # of tensors that share memory only the distance counts: the batches of one tensor are at many places
        start = int(x.storage_offset()) * x.dtype.itemsize
        memory, origin = first.setdefault(identity_of_storage(x), (i, start))
        return x.shape, x.stride(), x.dtype, x.device, memory, start - origin, x.is_conj(), x.is_neg()
    return float if is_traced(x) else (type(x), x, *_attributes(x))


def _attributes(x: Any, depth: int = _DEPTH) -> Sequence[Any]:
    """The modes of modules; the attributes of another object and of objects in them, where they have a hash."""
    if isinstance(x, (nn.Module, FunctionType, MethodType, partial)):
        return tuple(inner.training for inner in modules_outside(x))
    found = list[Any]()
    if depth and not isinstance(x, (Static, type)):
        for name, value in attributes_of(x).items():
            leaves, treedef = optree.tree_flatten(value, none_is_leaf=True)
            found += [name, treedef, *((type(y), y, _attributes(y, depth - 1)) for y in leaves if is_hashable(y))]
    return tuple(found)


def _settings() -> Any:
    """What changes the operators of a program from outside."""
    autocast = tuple(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda"))
    rank = RUN.get().rank  # a graph has what depends on its rank as constants
    deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.get_default_dtype(), autocast, torch.is_grad_enabled(), deterministic, rank


def is_traced(x: Any) -> bool:
    """Whether a leaf is an input of the graph: tensors, and floats, those of numpy too, as tensors of no dims."""
    return isinstance(x, (Tensor, float))


def refusal(x: Any) -> str:
    """Why a recorded step cannot take a leaf; empty if it can."""
    if not isinstance(x, Tensor):
        return opaque_problem(x) or ("" if is_hashable(x) else f"a {type(x).__name__}, which is not hashable")
    if type(x) not in (Tensor, torch.nn.Parameter, FakeTensor):
        return f"a {type(x).__name__}; expected a plain tensor"
    if memory_kind_of(x).pinned:
        return "offloaded (fs.offload); a graph computes in the memory of the device"
    return ""


def memory_outside(fn: Any) -> dict[int, list[tuple[str, Tensor]]]:
    """The tensors, buffers of modules too, that ``fn`` reaches besides its arguments, by memory, with their names."""
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in reached(fn, _DEPTH):
        is_module = isinstance(x, nn.Module)
        left = [(f"{each}.grad", p.grad) for each, p in x.named_parameters(name) if p.is_leaf] if is_module else []
        for each, y in [*x.named_buffers(name), *left] if is_module else [(name, x)]:
            if type(y) in (Tensor, nn.Parameter, FakeTensor) and y.layout == torch.strided:
                found.setdefault(identity_of_storage(y), []).append((each, y))
    return found


def modules_outside(fn: Callable[..., Any]) -> list[nn.Module]:
    """The modules that ``fn`` reaches besides its arguments, and all inside of them."""
    found = (x for _, x in reached(fn, _DEPTH) if isinstance(x, nn.Module))
    return list(dict.fromkeys(inner for x in found for inner in x.modules()))
