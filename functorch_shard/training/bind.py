"""``bind``: a model with other parameters, as a module of its own; ``apply``: its output and new buffers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from ..containers import filled_variables
from ..errors import hint, reject
from ..layout.trees import Full, Sharded
from ..sharding.gather import gather
from ..torch_internals.autograd import eager, writable_copy
from ..torch_internals.tensors import ModuleTree, detach_copy

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
    Attributes of ``__slots__`` are not copied.

    Args:
        model: may be on the meta device, where ``params`` has every parameter.
        params: parameters by name: a ``Sharded``, which is gathered, a ``Full``, or any mapping. Tied parameters under
            any of their names. Parameters that are left out are the model's own.
        buffers: buffers by name. These tensors are the result's, and forward may write to them. Those that are left out
            are copied. Either way ``dict(bound.named_buffers())`` has what BatchNorm wrote; :func:`apply` returns it.

    Returns:
        A module of the class of ``model``.

    Raises:
        ValueError: names that the model does not have (those of TorchScript modules among them), two tensors for one
            tied parameter, or tensors of the model on the meta device that are not given; all of them are listed.

    Cost:
        For a ``Sharded``, the collectives of :func:`gather`. A new object for each module, and a copy of the buffers.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Tanh())
        >>> params = fs.shard({"0.weight": torch.tensor([[1.0, 2.0]])}, fs.plan(model, fs.init_mesh()))
        >>> loss = lambda params, x: bind(model, params)[0](x).square().sum()
        >>> fs.grad(loss)(params, torch.tensor([[1.0, 3.0]]))["0"]
        tensor([14., 42.])
    """
    full = gather(params) if isinstance(params, Sharded) else params
    tree = ModuleTree(model)
    if isinstance(full, Full):  # the names that were tied where it was planned: torch's to("meta") unties them
        tied = [(alias, name) for alias, name in full.layout.aliases if alias in tree.parameters and name in full]
        full = {**{alias: full[name] for alias, name in tied}, **full}
    copies: dict[int, Any] = {id(x): x.clone() for x in tree.buffers.values()}  # by the id of the original
    copies |= _by_identity(tree, {**full, **(buffers or {})})
    copies |= {key: object.__new__(type(m)) for key, m in tree.modules.items()}
    copies |= {key: copies[id(m)] for key, m in tree.compiled.items()}
    for key, m in tree.modules.items():
        attributes = m.__dict__.copy()
        for name, x in attributes.items():
            kind = type(x)
            if kind in _OFTEN_EMPTY and not x:  # as the hooks of most modules
                attributes[name] = kind()
            elif kind is dict:  # most are of parameters or modules; the rest could do it, in twice the time
                attributes[name] = copies[id(x)] = {
                    key: copies[id(y)] if id(y) in copies else _rebound(y, copies) for key, y in x.items()
                }
            elif kind not in _ATOMS:
                attributes[name] = _rebound(x, copies, own=True)
        object.__setattr__(copies[key], "__dict__", attributes)
        detach_copy(copies[key], m)
    return copies.get(id(model), model)


def _by_identity(tree: ModuleTree, given: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return the given tensors by the id of the tensor that each replaces, under all of its names."""
    own = {**tree.parameters, **tree.buffers}
    problems: list[str] = []
    chosen: dict[int, Tensor] = {}
    for name, x in given.items():
        if name not in own:
            problems.append(f"{name!r}: not in the model{hint(name, list(own))}")
        elif chosen.setdefault(id(own[name]), x) is not x:
            tied = next(other for other in given if own.get(other) is own[name])
            problems.append(f"{name!r}: tied to {tied!r} in the model, but given another tensor")
    left = [name for name, x in own.items() if x.is_meta and id(x) not in chosen]
    if left and not all(x.is_meta for x in given.values()):
        problems += [f"{name!r}: on the meta device, and not given" for name in left]
    reject("bind", problems, _NAMES)
    return chosen


_NAMES = (
    "Pass tensors by the names of the model's own parameters and buffers; tied ones once, and none of a TorchScript "
    "module, which keeps its own."
)


def _with_values(x: Any, new: list[Any]) -> Any:
    made = x.copy()
    made.update(zip(x, new, strict=True))
    return made


def with_variables(x: FunctionType, values: Mapping[str, Any]) -> FunctionType:
    """Return ``x`` with ``values`` of variables in its closure; it shares the others with ``x``."""
    cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
    closure = tuple(CellType(values[name]) if name in values else cell for name, cell in cells)
    made = FunctionType(x.__code__, x.__globals__, x.__name__, x.__defaults__, closure)
    made.__kwdefaults__ = x.__kwdefaults__
    made.__dict__.update(x.__dict__)
    return made


def _with_others(x: FunctionType, new: list[Any]) -> FunctionType:
    *variables, defaults, named = new
    pairs = zip(filled_variables(x).items(), variables, strict=True)
    made = with_variables(x, {name: y for (name, old), y in pairs if y is not old})
    made.__defaults__, made.__kwdefaults__ = defaults, named
    return made


_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_OFTEN_EMPTY = {dict, OrderedDict, set}
_CONTAINERS: dict[type, Any] = {
    **dict.fromkeys((list, tuple, set), (list, lambda x, new: type(x)(new))),
    **dict.fromkeys((dict, OrderedDict, defaultdict), (lambda x: [*x.values()], _with_values)),
}
# What may hold a module or a tensor of the model: its parts, and how it is made again with others in their place.
_HOLDERS: dict[type, tuple[Callable[[Any], list[Any]], Callable[[Any, list[Any]], Any]]] = {
    **_CONTAINERS,
    MethodType: (lambda x: [x.__self__], lambda x, new: MethodType(x.__func__, *new)),
    partial: (lambda x: [x.func, x.args, x.keywords], lambda x, new: partial(new[0], *new[1], **new[2])),
    ref: (lambda x: [x()], lambda x, new: ref(*new)),
    FunctionType: (lambda x: [*filled_variables(x).values(), x.__defaults__, x.__kwdefaults__], _with_others),
}


def _rebound(x: Any, copies: dict[int, Any], *, own: bool = False) -> Any:
    """Return ``x`` with copies in place of their originals; a container that is a module's ``own`` is always copied."""
    if id(x) in copies:
        return copies[id(x)]
    if type(x) not in _HOLDERS:
        return x
    parts, again = _HOLDERS[type(x)]
    if type(x) is FunctionType:
        copies[id(x)] = x  # it may close over itself
    old = parts(x)
    new = [part if type(part) in _ATOMS else _rebound(part, copies) for part in old]
    if not (own and type(x) in _CONTAINERS) and all(map(is_, old, new)):
        return x
    copies[id(x)] = made = again(x, new)
    return made


def apply(
    model: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Call a model with the given parameters and buffers; return its output and the new buffers.

    ``functional_call`` for models whose forward updates buffers, such as BatchNorm. Updates, in place or by assignment,
    are returned: neither ``buffers`` nor the model are written to. ``model.train()`` and ``model.eval()`` have their
    usual meaning. A model that checkpoints itself is recomputed with these parameters; each batch updates the buffers
    once.

    Args:
        model: called as ``model(*args, **kwargs)``, as by :func:`bind`.
        params: parameters by name, as of :func:`bind`.
        buffers: those that forward writes to, by name: ``dict(model.named_buffers())`` or the result of :func:`init`.
        args, kwargs: for the model.

    Returns:
        ``(output, new_buffers)``, a dict as ``dict(model.named_buffers())``: statistics of this rank's own samples. Use
        ``collectives.pmean`` to average them over ranks. Both are differentiable if the model is. On simulated ranks,
        inside ``spmd``, every new buffer is a per-rank value.

    Raises:
        ValueError: as :func:`bind`. Or the model added or removed a buffer, or assigned to one of two that are tied.

    Cost:
        Those of :func:`bind`, and two copies of the buffers.

    Example:
        >>> mesh, model = fs.simulated_mesh(2), nn.BatchNorm1d(1, affine=False, momentum=0.5)
        >>> rows = torch.tensor([[[1.0], [3.0]], [[5.0], [9.0]]])   # row r = rank r's samples
        >>> mean = lambda x: apply(model, {}, dict(model.named_buffers()), x)[1]["running_mean"]
        >>> mesh.spmd(mean)(rows), model.running_mean
        (tensor([[1.0000],
                [3.5000]]), tensor([0.]))
    """
    copies = {id(x): writable_copy(x) for x in buffers.values()}
    bound = bind(model, params, {name: copies[id(x)] for name, x in buffers.items()})
    before, output = dict(bound.named_buffers()), bound(*args, **kwargs)
    after = dict(bound.named_buffers())
    odd = [f"{name!r}: added, removed, or no longer tied" for name in sorted(before.keys() ^ after.keys())]
    reject("apply", odd, "A model may change the values of its buffers while it runs, but not which buffers it has.")
    return output, {name: x.clone() for name, x in after.items()}  # recomputation in backward writes to the bound ones
