"""Refuse recomputations of ``torch.utils.checkpoint`` with other tensors than forward used.

See Note [Recomputation] in parameter_swap.py. Plain ``functional_call`` does not install its tensors again for the
recomputation. This is refused: in forward if lazy tensors or their ``Full`` detect it, otherwise when backward uses
other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any
from weakref import ref

import optree
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from .autograd import nodes
from .checkpointing import (
    checkpointed_regions,
    given_to_checkpoint,
    has_compiled,
    may_be_in_checkpoint,
    may_be_recomputing,
    recomputed_region,
    reentrant_checkpoint,
    refused_checkpoint,
    refused_reentrant,
    swapped_around_checkpoint,
)
from .parameter_swap import NEEDS_REAL_RANKS, NOT_REENTRANT, compiled_call, wrapper_of
from .pytree import GLOBAL_NAMESPACE, register_torch_node
from .transforms import in_transform

_USE_CALL = (
    "functional_call puts the module's own parameters back when it returns, so what a module that checkpoints itself "
    "recomputes in backward would use these. Write functorch_shard.call(model, params, ...) in place of "
    "functional_call(model, gather(params), (...)): its parameters stay valid until backward is done."
)


@contextmanager
def checkpoints_explained(verb: str) -> Iterator[None]:
    """Replace torch's errors for unsupported uses of ``torch.utils.checkpoint`` by ones that say what to do."""
    try:
        yield
    except RuntimeError as error:
        if refused_checkpoint(error):
            raise NotImplementedError(f"{verb}: {NEEDS_REAL_RANKS}") from error
        if refused_reentrant(error):
            raise RuntimeError(f"{verb}: {NOT_REENTRANT}") from error
        raise


def refuse_swapped(is_in: Callable[[Iterable[Any]], bool]) -> None:
    """Raise if a checkpoint uses a tensor that ``is_in`` those of a ``functional_call`` around the checkpoint."""
    if not may_be_in_checkpoint():
        return
    reentrant = reentrant_checkpoint() is not None
    if not checkpointed_regions() and not reentrant:
        return
    if any(is_in(swapped.values()) for swapped in swapped_around_checkpoint()) and not is_in(_passed()):
        more = f" And {NOT_REENTRANT}" if reentrant else ""
        raise RuntimeError(f"gather: a gathered parameter is used inside torch.utils.checkpoint. {_USE_CALL}{more}")


@contextmanager
def plain_tensors_watched(module: nn.Module) -> Iterator[None]:
    """A context in which ``functional_call`` runs ``module`` with plain tensors: refuse them inside a checkpoint."""
    if not torch.is_grad_enabled() or in_transform():
        yield
        return
    calls = {m: name for m in module.modules() if (name := compiled_call(m))}
    inside = {part for m in calls for part in m.modules()}  # torch.compile reads their tensors without __getitem__
    kinds = "_parameters", "_buffers"
    places = [(m, kind) for m in module.modules() if m not in inside for kind in kinds if m.__dict__[kind]]
    before = [(m.__dict__, name, m.__dict__[name]) for m, name in (*calls.items(), *places)]
    for m, name in calls.items():
        m.__dict__[name] = _refusing(m, m.__dict__[name])
    for m, kind in places:
        m.__dict__[kind] = _Watched(m.__dict__[kind])
    try:
        yield
    finally:
        for attributes, name, own in before:
            if isinstance(held := attributes[name], _Watched):
                own.clear()
                own.update(dict.copy(held))  # with assignments of the model
            attributes[name] = own


class _Watched(dict[str, Any]):
    """The dict of tensors of a module while ``functional_call`` runs it."""

    def __getitem__(self, name: str) -> Any:
        x = super().__getitem__(name)
        if not torch.compiler.is_compiling() and may_be_in_checkpoint() and not isinstance(x, Parameter):
            refuse_swapped(lambda values: any(x is y for y in values))
        return x

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  (this is get)

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict.copy(self),)  # a module may be copied while it runs


def _flatten(watched: _Watched) -> tuple[list[Any], list[str]]:
    return list(watched.values()), list(watched)


def _unflatten(names: Iterable[str], tensors: Iterable[Any]) -> dict[str, Any]:
    return dict(zip(names, tensors, strict=True))


# A dict is a node in both registries, a subclass of it is not; a module may flatten its own parameters while it runs.
register_torch_node(_Watched, _flatten, lambda tensors, names: _unflatten(names, tensors))
_register_optree: Any = optree.register_pytree_node  # typed for collections only
_register_optree(_Watched, lambda x: (*_flatten(x), tuple(x)), _unflatten, namespace=GLOBAL_NAMESPACE)


def _refusing(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        for part in module.modules():
            for kind in (part._parameters, part._buffers):
                _Watched(kind).values()
        return call(*args, **kwargs)

    return refusing


def _passed() -> list[Any]:
    """The arguments and closure of the innermost checkpointed function, which its recomputation has too."""
    function, args, kwargs = given_to_checkpoint()
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    bound = getattr(function, "args", ()), getattr(function, "keywords", {})  # of a functools.partial
    return _flat([args, kwargs, cells, bound])


def only_what_forward_used(value: Tensor) -> AbstractContextManager[object]:
    """A context for the backward of ``value`` that refuses recomputations with parameters that forward did not use.

    Not if forward was compiled: under a mode torch.compile would compile another graph, and save other tensors.
    """
    if not has_compiled():
        return _OnlyWhatForwardUsed(value)
    compiled = any(node.name() == "CompiledFunctionBackward" for node in nodes(value.grad_fn))
    return nullcontext() if compiled else _uncompiled()(value)


class _OnlyWhatForwardUsed(TorchFunctionMode):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self._value = ref(value)  # asynchronous collectives keep the modes they were started under
        self._leaves: set[int] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recomputing = may_be_recomputing()
        parameters = _parameters_of((*args, *kwargs.values())) if recomputing or torch.is_grad_enabled() else []
        for parameter in parameters if recomputing else ():
            self._check(parameter)
        result = func(*args, **kwargs)
        if parameters and any(isinstance(x, Tensor) and x.requires_grad for x in _flat(result)):
            self._refuse_own(parameters)
        return result

    def _refuse_own(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters if recomputed_region() is None else ():
            if parameter.requires_grad and not self._used(parameter):
                raise RuntimeError(_own_in_backward(parameter))

    def _check(self, parameter: Parameter) -> None:
        region = recomputed_region()
        if region is not None and wrapper_of(region) is None and not self._used(parameter):
            raise RuntimeError(
                f"grad: torch.utils.checkpoint recomputes with {_described(parameter)}, which forward did not use, or "
                f"which is frozen and may have other values. {_USE_CALL} For a module that is to use its own "
                "parameters: functorch_shard.call(module, dict(module.named_parameters()), ...)."
            )

    def _used(self, parameter: Parameter) -> bool:
        if self._leaves is None:
            value = self._value()
            assert value is not None, "whoever differentiates it holds it"
            self._leaves = {id(node.variable) for node in nodes(value.grad_fn) if hasattr(node, "variable")}
        return id(parameter) in self._leaves


def _described(parameter: Parameter) -> str:
    return f"a module's own parameter of shape {tuple(parameter.shape)}, {parameter.dtype}"


def _own_in_backward(parameter: Parameter) -> str:
    return (
        f"grad: an autograd.Function differentiates {_described(parameter)}, in its backward, and forward did not use "
        "this parameter. Functions that call modules again in backward (torchdiffeq's odeint_adjoint, reversible "
        "layers) find the module's own parameters, which functional_call and functorch_shard.call have put back, and "
        "gradients would be zeros. Use one that does not (odeint; functorch_shard.remat saves memory). Or write whole "
        "parameters (gather(params, lazy=False)) into the module, call backward(), and pass the gradients of its "
        "parameters to functorch_shard.scatter_grads."
    )


@cache
def _uncompiled() -> type[_OnlyWhatForwardUsed]:
    see: Any = torch.compiler.disable(_OnlyWhatForwardUsed.__torch_function__)
    return type("_Uncompiled", (_OnlyWhatForwardUsed,), {"__torch_function__": see})


def _parameters_of(x: Any) -> list[Parameter]:
    return [y for y in _flat(x) if isinstance(y, Parameter)]


def _flat(x: Any) -> list[Any]:
    if isinstance(x, dict):
        x = list(x.values())
    return [z for y in x for z in _flat(y)] if isinstance(x, (list, tuple)) else [x]
