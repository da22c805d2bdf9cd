"""The attributes in which modules keep tensors, modules and hooks, and what torch keeps by the identity of a module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_HOOKS = tuple(name for name, x in nn.Module().__dict__.items() if type(x) is OrderedDict)
_REGISTERED = "_parameters", "_buffers", "_modules"
_OTHERS = frozenset({*_HOOKS, *_REGISTERED, "training", "_is_full_backward_hook", "_non_persistent_buffers_set"})
_COMPILED = "_orig_mod"


class ModuleTree:
    """The modules below ``root``, and their tensors by all of their names."""

    def __init__(self, root: nn.Module) -> None:
        self.modules: dict[int, nn.Module] = {}  # by id, each once
        self.compiled: dict[int, nn.Module] = {}  # torch.compile(module): the module
        self.parameters: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.scripted: dict[str, Tensor] = {}  # of TorchScript modules, which are not entered
        self._add(root, "")

    def _add(self, module: nn.Module, path: str) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self.scripted |= dict(module.named_parameters(path[:-1])) | dict(module.named_buffers(path[:-1]))
            return
        children = module._modules
        if _COMPILED in children:
            self.compiled[id(module)] = children[_COMPILED]  # pyright: ignore[reportArgumentType]
        else:
            self.modules[id(module)] = module
        for name, x in module._parameters.items():
            if x is not None:
                self.parameters[path + name] = x
        for name, x in module._buffers.items():
            if x is not None:
                self.buffers[path + name] = x
        for name, child in children.items():
            if child is not None:
                self._add(child, f"{path}{name}.")


def attributes_of(module: nn.Module, copies: Mapping[int, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the attributes of ``module`` with ``copies`` of tensors and modules, and names of those left to copy."""
    new = module.__dict__.copy()
    for kind in _REGISTERED:
        own = new[kind]
        new[kind] = {name: copies.get(id(x), x) for name, x in own.items()} if own else {}
    new["_non_persistent_buffers_set"] = new["_non_persistent_buffers_set"].copy()
    left = new.keys() - _OTHERS
    for name in _HOOKS:
        if new[name]:
            left.add(name)
        else:
            new[name] = OrderedDict()
    return new, left


def detach_copy(copy: nn.Module, module: nn.Module) -> None:
    """Detach ``copy`` from what torch keeps of ``module``: a compiled call, and weights of ``parametrize.cached``.

    Torch knows cached weights by the id of ``module``, which properties of its class close over.
    """
    if "_compiled_call_impl" in copy.__dict__:  # of Module.compile()
        copy.__dict__["_compiled_call_impl"] = None
    if "parametrizations" in module._modules and parametrize.is_parametrized(module):
        cls: Any = type(module)
        computed = {name: _computed(name, getattr(cls, name)) for name in cast("Any", module.parametrizations)}
        object.__setattr__(copy, "__class__", type(cls.__name__, (cls,), computed))


def _computed(name: str, cached: property) -> property:
    return property(lambda self: self.parametrizations[name](), cached.fset)
