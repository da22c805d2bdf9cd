"""``remat``: a function whose derivatives keep its inputs alone, and run it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import getclosurevars, unwrap
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import optree
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..collectives.boundary import means_noted
from ..communication.simulated import Index, as_ranks, running_ranks
from ..containers import opened, place, refuse_opaque
from ..errors import reject
from ..layout.trees import take_tensors
from ..torch_internals.lowering import is_differentiated
from ..torch_internals.process_settings import own_parametrizations
from ..torch_internals.tensors import version_of
from ..torch_internals.transforms import current_level, without_batches
from .captured import Captured, captured, generators_in
from .first_run import FirstRun, first_run
from .recomputed import Program
from .save_policy import Policy, Saves, context_fn_of, saves_by
from .surroundings import surroundings

if TYPE_CHECKING:
    from .saved_results import Saved

Fn = TypeVar("Fn", bound=Callable[..., Any])


def remat(fn: Fn, *, preserve_rng_state: bool = True, policy: Policy | None = None) -> Fn:
    """Return ``fn`` with derivatives that keep its inputs alone and run it again: activation checkpointing.

    The values and the derivatives are those of ``fn``, of every order, in both modes, in any nesting of ``fs.grad``,
    ``backward()`` and ``torch.func``'s ``grad``, ``vjp``, ``jvp``, ``vmap``, ``jacrev`` and the like, also on simulated
    ranks, where ``torch.utils.checkpoint`` cannot be used. *Saved* are the tensors that go in; of a ``Sharded`` and of
    a lazily gathered parameter that is the shard. *Recomputed* is everything else: activations, and the gathers inside,
    which every rank issues again in backward in the same order. Random numbers are the same each time.

    Args:
        fn: a pure function of pytrees: a function, a ``functools.partial``, a module or a method of one. Tensors in its
            closure and defaults are inputs too, with the values of the call, and get their gradients. So are the
            parameters and buffers of a module: ``fs.remat(block)(x)`` is run again with those of the
            ``functional_call``, ``fs.call`` or ``fs.apply`` that it runs in.
        preserve_rng_state: whether ``fn`` may draw random numbers, on the CPU or on the devices of its inputs, or from
            a ``torch.Generator`` that is an argument, in its closure, a global that it names, or an attribute of its
            module. Where it draws none, ``False`` does without the states of the generators, 5 KB a call.
        policy: which results of operators inside are saved too, and not computed again, as
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it: a list of operators to save,
            ``[torch.ops.aten.mm.default]``, or a function of ``(context, op, *args, **kwargs)`` that returns a
            ``CheckpointPolicy`` or a bool, called in the first run alone. Operators are those below all transforms;
            under a vmap, and so on batched simulated ranks, a list with ``mm`` or ``addmm`` has ``bmm`` too. Never
            saved are views, random numbers, constants, and what is computed from gathered parameters alone.

    Returns:
        A function with the arguments of ``fn``. Results that are not floating-point tensors are those of the first run.
        Where nothing is differentiated it calls ``fn``. Compiled, it is ``torch.utils.checkpoint``, and inside a
        transform ``fn``.

    Raises:
        ValueError: results depend on a tensor that needs a gradient and is none of these inputs: a global, an
            attribute, a module's own parameter in a closure; the message names it. Or ``fn`` writes to an input in
            place (:func:`apply` returns new buffers instead); only the statistics of a BatchNorm in the module that
            ``fn`` is, or is a method of, may be written to: they are at first, and not again.
        TypeError: an argument with tensors to differentiate, or a result with tensors, is not a supported container. Or
            ``policy`` has something else than operators with their overload.
        RuntimeError: run again, ``fn`` returned other shapes or dtypes; or an input, or what ``policy`` saved, was
            written to since.

    Cost:
        A gradient runs ``fn`` twice: two all-gathers for each one inside, and one reduction. Every further derivative,
        forward mode too, runs what it differentiates once more. Memory: the inputs, and while it is run again the
        activations of this one call; what ``policy`` saves. ``torch.func.grad`` also keeps the gradients of its results
        until it ends, as ``fs.grad`` does inside another transform.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> params = fs.shard({"fc.w": torch.ones(2)}, fs.plan({"fc.w": torch.ones(2)}, mesh))
        >>> part = fs.remat(lambda params, x: (fs.gather(params)["fc.w"] * x).square().sum())
        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])     # row r = rank r
        >>> with fs.testing.count_collectives() as seen:
        ...     mesh.spmd(fs.grad(part))(params, rows)["fc"], seen["all_gather"]
        (tensor([[10.],
                [20.]]), 2)

    The recomputation of ``jax.checkpoint``, under torch's transforms; ``policy`` is its ``policy``.
    """

    saves = None if policy is None else saves_by(policy)

    @wraps(fn, updated=())
    def rematted(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            options = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state, **context_fn_of(policy)}
            return fn(*args, **kwargs) if current_level() else checkpoint(fn, *args, **options, **kwargs)
        call = _call(fn, args, kwargs)
        if is_differentiated(call.tensors):
            return _rematted(call, preserve_rng_state, saves() if saves else None)
        result = fn(*args, **kwargs)
        if is_differentiated(take_tensors(result)[0]):
            reject("remat", _others(fn), _PASS_IT)
        return result

    return rematted  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, eq=False)
class _Call:
    """One call: all ``tensors`` that go in, and :meth:`run` with others in their place."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    captured: Captured
    axes: Sequence[Index]
    tensors: Sequence[Tensor]
    put_back: Callable[[Sequence[Tensor]], Any]

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """Those that the call has of its own, beside torch's."""
        return [*generators_in((self.args, self.kwargs)), *self.captured.generators]

    def run(self, tensors: Sequence[Tensor], again: bool) -> Any:
        num_inputs = len(tensors) - len(self.axes)
        num_given = num_inputs - len(self.captured.tensors)
        given, others, indices = tensors[:num_given], tensors[num_given:num_inputs], tensors[num_inputs:]
        args, kwargs = self.put_back(given)
        ranks = dict(zip(self.axes, indices, strict=True)) if again else {}
        with as_ranks(ranks), own_parametrizations(), self.captured.bound(others, again) as fn:
            return fn(*args, **kwargs)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    tree = opened((args, kwargs))
    refuse_opaque("remat", tree, "arguments", matters=lambda x: isinstance(x, Tensor) and is_differentiated([x]))
    given, put_back = take_tensors(tree)
    inside, ranks = captured(fn), running_ranks()
    return _Call(fn, args, kwargs, inside, [*ranks], [*given, *inside.tensors, *ranks.values()], put_back)


def _rematted(call: _Call, preserve_rng_state: bool, saves: Saves | None) -> Any:
    surrounded = surroundings(call.tensors, preserve_rng_state, call.generators)
    versions = [version_of(without_batches(x)) for x in call.tensors]
    first = _first(call, preserve_rng_state, saves)
    call.captured.finish()
    _refuse_writes(call, versions)
    if first.run.on_others:
        reject("remat", _others(call.fn), _PASS_IT)
    again = _again(call, surrounded, first.saved.known(), _forms(first.run.results))
    program = Program(again, averages=first.averages)
    return first.rebuild(first.run.attached(program, call.tensors, first.saved.tensors))


@dataclass(frozen=True, eq=False)
class _First:
    """The first run of a call: its results and what rebuilds the tree of them, what it saved, whether it took means."""

    run: FirstRun
    rebuild: Callable[..., Any]
    saved: Saved
    averages: bool


def _first(call: _Call, preserve_rng_state: bool, saves: Saves | None) -> _First:
    from .saved_results import saving  # when it is used: importing the package stays fast

    rebuild: list[Callable[..., Any]] = []
    kept: list[Saved] = []

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        with saving(saves, tensors, preserve_rng_state) as saved:
            result = opened(call.run(tensors, again=False))
        kept.append(saved())
        refuse_opaque("remat", result, "the result", matters=lambda x: isinstance(x, Tensor) and x.is_floating_point())
        results, put_back = take_tensors(result)
        rebuild.append(put_back)
        return results

    with means_noted() as means:
        first = first_run(run, call.tensors)
    return _First(first, rebuild[0], kept[-1], bool(means))


def _again(
    call: _Call, surrounded: Callable[[], AbstractContextManager[None]], known: Saved, forms: Sequence[Any]
) -> Callable[[Sequence[Tensor]], list[Tensor | None]]:
    """The call again, as a function of its tensors and of those that were saved."""
    num_inputs = len(call.tensors)

    def run(tensors: Sequence[Tensor]) -> list[Tensor | None]:
        inputs = tensors[:num_inputs]
        with surrounded(), known.reused(inputs, tensors[num_inputs:]):
            results, _ = take_tensors(call.run(inputs, again=True))
        _refuse_other_forms(forms, _forms(results))
        return [*results]

    return run


def _forms(results: Sequence[Tensor]) -> list[Any]:
    return [(tuple(x.shape), x.dtype) for x in results]


def _refuse_writes(call: _Call, versions: Sequence[int]) -> None:
    paths, leaves, _ = optree.tree_flatten_with_path(opened((call.args, call.kwargs)), none_is_leaf=True)
    places = [path for path, x in zip(paths, leaves, strict=True) if isinstance(x, Tensor)]
    changed = [version_of(without_batches(x)) != before for x, before in zip(call.tensors, versions, strict=True)]
    written = [path for path, wrong in zip(places, changed, strict=False) if wrong]  # arguments come first
    problems = [f"{'kwargs' if path[0] else 'args'}{place(path[1:])}: written to by the function" for path in written]
    advice = "It is run again in backward, and would write again. Return new values; fs.apply does so for buffers."
    reject("remat", problems, advice)


def _refuse_other_forms(forms: Sequence[Any], again: Sequence[Any]) -> None:
    if forms != again:
        raise RuntimeError(
            f"remat: run again in backward, the function returned tensors of other shapes or dtypes: {again}, at first "
            f"{forms}. It has to compute the same from the same arguments: pass what it depends on as arguments."
        )


def _others(fn: Any) -> list[str]:
    """The variables of ``fn`` that it may depend on and that are not inputs."""
    inner = unwrap(fn.func if isinstance(fn, partial) else fn)
    used = getclosurevars(inner) if isinstance(inner, FunctionType) else None
    named = {f"global {name!r}": x for name, x in used.globals.items()} if used else {}
    named |= {repr(name): x for name, x in used.nonlocals.items()} if used else {}
    found = [
        f"{name}, a {type(x).__name__}: not an input" for name, x in named.items() if is_differentiated(_inside(x))
    ]
    return found or ["the result depends on a tensor that needs a gradient and is not an input"]


def _inside(x: Any) -> list[Tensor]:
    return [*x.parameters()] if isinstance(x, nn.Module) else take_tensors(x)[0]


_PASS_IT = (
    "What the function uses would get no gradient when it is run again. Pass it as an argument, "
    "fs.remat(lambda params, x: functional_call(block, params, (x,)))(params, x), or let remat call the module, "
    "fs.remat(block)(x), which takes its parameters along."
)
