"""``fs.remat``: a part of a model whose derivatives save its inputs and run it again, under every transform.

Here is a call as a function of tensors, its random numbers, and what is refused; ``program``: the derivatives of such a
function, Note [Remat]. Imports ``training`` and what is below it; imported by programs only. The package is not called
``remat``, because ``fs.remat`` is the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager as ContextManager
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from ..containers import filled_variables, opened, reached, refuse_opaque
from ..layout.trees import take_tensors
from ..mesh.simulated import Index
from ..running import RUN, running
from ..torch_internals.autograd import eager, own_parametrizations, without_batches
from ..torch_internals.satellites import is_differentiated
from ..torch_internals.tensors import version_of
from ..training.bind import bind, with_variables
from .program import Program, first_run

Fn = TypeVar("Fn", bound=Callable[..., Any])


def remat(fn: Fn) -> Fn:
    """Return ``fn`` with derivatives that save its inputs only and run it again: activation checkpointing.

    Values and derivatives are those of ``fn``, of every order, in both modes, in any nesting of ``fs.grad``,
    ``backward()`` and the transforms of ``torch.func``, also on simulated ranks, where ``torch.utils.checkpoint``
    cannot be used. *Saved* are the tensors that go in; of a ``Sharded`` and of a lazily gathered parameter the shard.
    *Recomputed* are activations and the gathers inside, which every rank issues again in backward in the same order.

    Args:
        fn: a pure function of pytrees: a function, a ``functools.partial``, a module or a method of one. Inputs are the
            tensors in its arguments, and the parameters and buffers of a module that is ``fn``, has the method, or is
            an argument: ``fs.remat(block)(x)``. Inside of ``functional_call`` these are the given ones.
            Random numbers are the same each time: from the generators of the CPU and of the devices of its inputs, or
            from a ``torch.Generator`` that is an argument, a variable that ``fn`` closes over, or an attribute of a
            module among these.

    Returns:
        A function with the arguments of ``fn``. Where nothing is differentiated it calls ``fn``. ``torch.compile``
        breaks its graph there.

    Raises:
        ValueError: results depend on a tensor that needs a gradient and is not an input. Or ``fn`` writes to an input
            in place, such as the statistics of BatchNorm: :func:`apply` returns new ones.
        TypeError: an argument with tensors to differentiate, or a result with tensors, is not a supported container.
        RuntimeError: run again, ``fn`` returned other shapes or dtypes; or an input was written to since.

    Cost:
        A gradient runs ``fn`` twice: two all-gathers for each one inside, and one reduction. Every further derivative,
        forward mode too, runs what it differentiates once more. Memory: the inputs, and while it is run again the
        activations of this one call. ``torch.func.grad`` also keeps the gradients of its results until it ends.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> params = fs.shard({"fc.w": torch.ones(2)}, fs.plan({"fc.w": torch.ones(2)}, mesh))
        >>> part = fs.remat(lambda params, x: (fs.gather(params)["fc.w"] * x).square().sum())
        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])     # row r = rank r
        >>> with fs.testing.count_collectives() as seen:
        ...     mesh.spmd(fs.grad(part))(params, rows)["fc"], seen["all_gather"]
        (tensor([[10.],
                [20.]]), 2)

    The recomputation of ``jax.checkpoint``, under torch's transforms.
    """

    @eager
    @wraps(fn, updated=())
    def rematted(*args: Any, **kwargs: Any) -> Any:
        call = _call(fn, args, kwargs)
        if is_differentiated(call.tensors):
            return _rematted(call)
        result = fn(*args, **kwargs)
        if is_differentiated(take_tensors(result)[0]):
            raise ValueError(_PASS_IT)
        return result

    return cast(Fn, rematted)


Put = Callable[[Iterator[Tensor], bool], Any]  # takes tensors, and whether the function is run again


@dataclass(frozen=True, eq=False)
class _Call:
    """A call as a function of ``tensors``: those of each leaf of ``tree``, and the indices of running ranks."""

    tree: Any  # the function or the owner of the method, the arguments, the keyword arguments
    method: Any  # the method as a function of its owner; None for a function
    taken: Sequence[tuple[Sequence[Tensor], Put]]
    ranks: Mapping[Index, Tensor]
    closed_over: Sequence[Any]  # tensors, modules and generators that its functions reach otherwise

    @property
    def tensors(self) -> list[Tensor]:
        return [*(x for tensors, _ in self.taken for x in tensors), *self.ranks.values()]

    def run(self, tensors: Sequence[Tensor], again: bool) -> Any:
        rest = iter(tensors)
        leaves = [put(rest, again) for _, put in self.taken]
        form = optree.tree_structure(self.tree, none_is_leaf=True)
        owner, args, kwargs = cast("tuple[Any, Any, Any]", optree.tree_unflatten(form, leaves))
        with running(dict(zip(self.ranks, rest, strict=True)) if again else {}), own_parametrizations():
            result = (MethodType(self.method, owner) if self.method else owner)(*args, **kwargs)
        given = {id(x) for x in tensors}
        if any(id(x) not in given for module in leaves if isinstance(module, nn.Module) for x in module.buffers()):
            raise ValueError(_RETURN_IT)
        return result


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    while isinstance(fn, partial):
        fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
    owner, method = (fn.__self__, fn.__func__) if isinstance(fn, MethodType) else (fn, None)
    tree = opened((owner, args, kwargs))
    refuse_opaque("remat", tree[1:], "arguments", matters=lambda x: isinstance(x, Tensor) and is_differentiated([x]))
    leaves = optree.tree_leaves(tree, none_is_leaf=True)
    functions = [x for x in (method, *leaves) if isinstance(x, (FunctionType, MethodType, partial))]
    closed_over = [y for x in functions for _, y in reached(x)]
    modules = [x for x in closed_over if isinstance(x, nn.Module)]
    if not all(isinstance(p, nn.Parameter) for module in modules for p in module.parameters()):
        raise ValueError(_PASS_IT)  # functional_call calls it, and it will have its own parameters again
    return _Call(tree, method, [*map(_taken, leaves)], RUN.get().indices, closed_over)


def _taken(x: Any) -> tuple[Sequence[Tensor], Put]:
    """Return the tensors of a leaf, and what makes a leaf with others."""
    if isinstance(x, Tensor):
        return [x], lambda rest, again: next(rest)
    if isinstance(x, nn.Module):
        own = dict(x.named_parameters(remove_duplicate=False)) | dict(x.named_buffers(remove_duplicate=False))
        each = {id(y): y for y in own.values()}  # when functional_call ends, it may untie what has several names

        def bound(rest: Iterator[Tensor], again: bool) -> nn.Module:
            new = dict(zip(each, rest, strict=False))
            return bind(x, {name: new[id(y)] for name, y in own.items()})

        return [*each.values()], bound
    now = _as_now(x)
    return [], lambda rest, again: now if again else x


def _rematted(call: _Call) -> Any:
    tensors, put_back = call.tensors, list[Callable[..., Any]]()
    closed_over = [x for x in call.closed_over if isinstance(x, Tensor)]
    surrounded = _surroundings(call)
    plain = [without_batches(x) for x in (*tensors, *closed_over)]
    versions = [*map(version_of, plain)]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        result = opened(call.run(tensors, again=False))
        refuse_opaque("remat", result, "the result", matters=lambda x: isinstance(x, Tensor) and x.is_floating_point())
        results, rebuild = take_tensors(result)
        put_back.append(rebuild)
        return results

    results, on_others, attach = first_run(run, tensors)
    if versions != [*map(version_of, plain)]:
        raise ValueError(_RETURN_IT)
    if on_others:
        raise ValueError(_PASS_IT)
    forms = [(tuple(x.shape), x.dtype) for x in results]

    def run_again(tensors: Sequence[Tensor]) -> list[Tensor | None]:
        with surrounded():
            results, _ = take_tensors(call.run(tensors, again=True))
        if [(tuple(x.shape), x.dtype) for x in results] != forms:
            raise RuntimeError(_OTHER_FORMS)
        return [*results]

    batched = any(without_batches(x) is not x for x in closed_over)
    return put_back[0](attach(Program(run_again, batched=batched)))


def _as_now(fn: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Return a function with the variables of its closure as they are now; anything else unchanged."""
    if not isinstance(fn, FunctionType) or not fn.__closure__ or fn in inside:
        return fn
    return with_variables(fn, {name: _as_now(x, (*inside, fn)) for name, x in filled_variables(fn).items()})


def _surroundings(call: _Call) -> Callable[[], ContextManager[None]]:
    """Return what makes contexts with the autocast and random numbers of now."""
    leaves, tensors = [*optree.tree_leaves(call.tree), *call.closed_over], call.tensors
    modules = [module for x in leaves if isinstance(x, nn.Module) for module in x.modules()]
    drawn_from = [*leaves, *(x for module in modules for x in vars(module).values())]  # if they are generators
    kinds = sorted({x.device.type for x in tensors} - {"cpu", "meta"})
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", *kinds)]
    generators = [torch.default_generator, *(x for x in drawn_from if isinstance(x, Generator))]
    states = [x.get_state() for x in generators]
    devices, on_devices = get_device_states(*tensors) if kinds else ([], [])

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype, enabled in casts:
                if (dtype, enabled) != (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            if devices:
                stack.enter_context(torch.random.fork_rng([*set(devices)], device_type=kinds[0]))
                set_device_states(devices, on_devices, device_type=kinds[0])
            for x, state in zip(generators, states, strict=True):
                stack.callback(x.set_state, x.get_state())
                x.set_state(state)
            yield

    return again


_PASS_IT = (
    "remat: the function uses a tensor that needs a gradient, or a module that functional_call calls, which is not an "
    "input: its gradient would be lost, or the function run again with other values. Pass what it uses as an argument: "
    "fs.remat(lambda params, x: functional_call(block, params, (x,)))(params, x). Or let remat call the module: "
    "fs.remat(block)(x), and outside of the model fs.remat(fs.bind(block, params))(x)."
)
_RETURN_IT = (
    "remat: the function writes to an input or a variable in place, and would again in backward. Return new values, as "
    "fs.apply(module, params, buffers, x) does."
)
_OTHER_FORMS = (
    "remat: run again in backward, the function returned tensors of other shapes or dtypes. It has to compute the same "
    "from the same arguments: pass what it depends on as arguments."
)
