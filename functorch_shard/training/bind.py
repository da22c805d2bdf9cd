"""``bind``: a model with other parameters, as a module of its own."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from ..errors import hint, reject
from ..layout.trees import Full, Sharded
from ..sharding.gather import gather
from ..torch_internals.autograd import eager
from ..torch_internals.tensors import ModuleTree, attributes_of, detach_copy

Model = TypeVar("Model", bound=nn.Module)


@eager
def bind(model: Model, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> Model:
    """Return a copy of ``model`` whose parameters are ``params``; ``model`` is never written to.

    A shallow copy of the module tree: each module is a new object of the same class, each tensor that is not given is
    shared. The result keeps its parameters, so whatever reads them later gets these: backward of a model that
    checkpoints itself (``torch.utils.checkpoint``), closures and distributions that forward returned, hooks, adjoint
    solvers, other threads. ``torch.func.functional_call`` puts the model's own back when forward returns.

    Any method of the result works: ``bind(model, params).encode(x)``. Hooks, tied parameters, parametrizations and
    modules that stand twice in the tree are kept; modes, hooks and attributes that are set later are the copy's own.
    Modules are replaced in attributes, and in lists, tuples, sets, dicts, bound methods, partials and closures there.
    Objects of other classes are shared: one that holds a module of the model uses the model's own. A module compiled by
    ``torch.compile`` is bound as what was compiled. A TorchScript module is shared; its tensors cannot be given.

    Args:
        model: may be on the meta device, where ``params`` has every parameter.
        params: parameters by name: a ``Sharded``, which is gathered, a ``Full``, or any mapping. Tied parameters under
            any of their names. Parameters that are left out are the model's own.
        buffers: buffers by name. These tensors are the result's, and forward may write to them. Those that are left out
            are copied. Either way ``dict(bound.named_buffers())`` has what BatchNorm wrote; :func:`apply` returns it.

    Returns:
        A module of the class of ``model``.

    Raises:
        TypeError: ``model`` is not a module, or ``params`` or ``buffers`` is not a mapping of tensors.
        ValueError: names that the model does not have or that a TorchScript module has, two tensors for one tied
            parameter, or tensors of the model on the meta device that are not given; all of them are listed.

    Cost:
        For a ``Sharded``, the collectives of :func:`gather`. A new object for each module, and a copy of the buffers.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Tanh())
        >>> params = fs.shard({"0.weight": torch.tensor([[1.0, 2.0]])}, fs.plan(model, fs.init_mesh()))
        >>> loss = lambda params, x: bind(model, params)[0](x).square().sum()
        >>> fs.grad(loss)(params, torch.tensor([[1.0, 3.0]]))["0"]
        tensor([14., 42.])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"bind: model: got {type(model).__name__}, expected an nn.Module")
    for what, given in (("params", params), ("buffers", {} if buffers is None else buffers)):
        if not isinstance(given, Mapping):
            raise TypeError(f"bind: {what}: got {type(given).__name__}, expected a mapping name -> tensor")
    full = gather(params) if isinstance(params, Sharded) else params
    tree = ModuleTree(model)
    if isinstance(full, Full):  # the names that were tied where it was planned: torch's to("meta") unties them
        tied = [(alias, name) for alias, name in full.layout.aliases if alias in tree.parameters and name in full]
        full = {**{alias: full[name] for alias, name in tied}, **full}
    modules = {key: object.__new__(type(m)) for key, m in tree.modules.items()}
    copies: dict[int, Any] = {id(x): x.clone() for x in tree.buffers.values()}  # by the id of the original
    copies |= {**_by_identity(tree, {**full, **(buffers or {})}), **modules}
    copies |= {key: copies[id(m)] for key, m in tree.compiled.items()}
    for key, m in tree.modules.items():
        attributes, left = attributes_of(m, copies)
        for name in left:
            if type(x := attributes[name]) not in _ATOMS:
                attributes[name] = _rebound(x, copies, own=True)
        object.__setattr__(modules[key], "__dict__", attributes)
        for name in type(m).__dict__.get("__slots__", ()):
            object.__setattr__(modules[key], name, _rebound(getattr(m, name), copies))
        detach_copy(modules[key], m)
    return copies.get(id(model), model)


def _by_identity(tree: ModuleTree, given: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return the given tensors by the id of the tensor that each replaces, under all of its names."""
    own = {**tree.parameters, **tree.buffers}
    problems: list[str] = []
    chosen: dict[int, Tensor] = {}
    for name, x in given.items():
        if name not in own:
            scripted = ": of a TorchScript module, which keeps its own" if name in tree.scripted else ""
            problems.append(f"{name!r}{scripted or f': not in the model{hint(name, list(own))}'}")
        elif chosen.setdefault(id(own[name]), x) is not x:
            tied = next(other for other in given if own.get(other) is own[name])
            problems.append(f"{name!r}: tied to {tied!r} in the model, but given another tensor")
    if not all(x.device.type == "meta" for x in given.values() if isinstance(x, Tensor)):
        left = [name for name, x in own.items() if x.device.type == "meta" and id(x) not in chosen]
        problems += [f"{name!r}: on the meta device, and not given" for name in left]
    advice = "Pass tensors by the names of the model's own parameters and buffers; tied ones once."
    if any(name in tree.scripted for name in given):
        advice += " Bind a module before torch.jit.script, or leave its parameters out: fs.plan(..., ignored=names)."
    reject("bind", problems, advice)
    wrong = [f"{name!r}: got {type(x).__name__}" for name, x in given.items() if not isinstance(x, Tensor)]
    reject("bind", wrong, "Parameters and buffers are tensors.", TypeError)
    return chosen


_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}


def _rebound(x: Any, copies: dict[int, Any], *, own: bool = False) -> Any:
    """Return ``x`` with copies in place of their originals; a container that is a module's ``own`` is always copied."""
    kind = type(x)
    if kind in _ATOMS:
        return x
    if id(x) in copies:
        return copies[id(x)]
    if kind in _CONTAINERS:
        return _container(x, copies, own)
    again = partial(_rebound, copies=copies)
    if kind is MethodType:
        owner = again(x.__self__)
        return x if owner is x.__self__ else MethodType(x.__func__, owner)
    if kind is partial:
        parts = again(x.func), again(x.args), again(x.keywords)
        same = parts[0] is x.func and parts[1] is x.args and parts[2] is x.keywords
        return x if same else partial(parts[0], *parts[1], **parts[2])
    if kind is ref:
        return x if id(x()) not in copies else ref(copies[id(x())])
    return _function(x, copies) if kind is FunctionType and x.__closure__ else x


_CONTAINERS = {list, tuple, set, dict, OrderedDict, defaultdict}


def _container(x: Any, copies: dict[int, Any], own: bool) -> Any:
    """Return one copy for all who hold ``x``; ``x`` itself if nothing in it changes and no module's attribute is it."""
    values = x.values() if isinstance(x, dict) else x
    new = [_rebound(value, copies) for value in values]
    if not own and all(map(is_, values, new)):
        return x
    if isinstance(x, dict):
        made = x.copy()
        made.update(zip(x, new, strict=True))
    else:
        made = type(x)(new)
    copies[id(x)] = made
    return made


def _function(x: FunctionType, copies: dict[int, Any]) -> Any:
    """Return ``x`` with copies in its closure; other variables stay shared with ``x``."""
    copies[id(x)] = x  # a function may close over itself
    cells = []
    for cell in x.__closure__ or ():
        content = _content(cell)
        new = _rebound(content, copies)
        cells.append(cell if new is content else CellType(new))
    if all(map(is_, cells, x.__closure__ or ())):
        return x
    made = FunctionType(x.__code__, x.__globals__, x.__name__, x.__defaults__, tuple(cells))
    made.__kwdefaults__ = x.__kwdefaults__
    made.__dict__.update(x.__dict__)
    copies[id(x)] = made
    return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
