"""The tensors that a function uses besides its arguments, and a way to run it with others in their place.

Found are those in the closure and the defaults of a function and in a ``functools.partial``, and the parameters and
buffers of a module whose call or method it is. A module in a closure is searched while ``functional_call`` or the like
runs it with other tensors than its own. Not found are globals and attributes of other objects. Generators of random
numbers are found there too, and among globals and the attributes of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import optree
import torch
from torch import Tensor, nn

from ..containers import opened
from ..errors import reject
from ..layout.trees import take_tensors
from ..torch_internals.lowering import is_differentiated
from ..torch_internals.parameter_swap import Swap
from ..torch_internals.tensors import version_of
from ..torch_internals.transforms import without_batches


@dataclass(frozen=True, eq=False)
class Captured:
    """The ``tensors`` of a value, and ``bound(others, again)``: a context with the value that has others instead.

    ``again``: as it was when this was made, and without effects on anything outside. ``finish`` is called after the
    first run, outside of transforms of it. ``generators`` are those that it may draw from.
    """

    tensors: Sequence[Tensor]
    bound: Callable[[Sequence[Tensor], bool], AbstractContextManager[Any]]
    finish: Callable[[], None] = lambda: None
    generators: Sequence[torch.Generator] = ()


def captured(fn: Callable[..., Any]) -> Captured:
    """What ``fn`` captures."""
    return _of_module(fn, fn) if isinstance(fn, nn.Module) else _of(fn, ())


def _of(x: Any, callers: tuple[Any, ...]) -> Captured:
    if isinstance(x, FunctionType) and x not in callers:
        return _of_function(x, (*callers, x))
    if isinstance(x, partial):
        return _of_partial(x, callers)
    if isinstance(x, MethodType) and isinstance(x.__self__, nn.Module):
        return _of_module(x.__self__, x)
    if isinstance(x, nn.Module):
        is_swapped = any(not isinstance(p, nn.Parameter) for p in x.parameters())
        return _of_module(x, x) if is_swapped else _constant(x)
    return _of_tree(x)


def _constant(x: Any) -> Captured:
    return Captured((), lambda *_: nullcontext(x), generators=generators_in(x))


def _of_tree(x: Any) -> Captured:
    tensors, put_back = ([], None) if callable(x) else take_tensors(x)
    matters = any(without_batches(y) is not y for y in tensors) or is_differentiated(tensors)
    if put_back is None or not matters:
        return _constant(x)
    return Captured(tensors, lambda others, _: nullcontext(put_back(others)), generators=generators_in(x))


def generators_in(x: Any) -> list[torch.Generator]:
    """The generators in a pytree, or among the attributes of a module and of those inside of it."""
    if isinstance(x, nn.Module):
        return [y for module in x.modules() for y in vars(module).values() if isinstance(y, torch.Generator)]
    return [] if callable(x) else [y for y in optree.tree_leaves(opened(x)) if isinstance(y, torch.Generator)]


def _together(parts: Sequence[Captured], build: Callable[[Sequence[Any], bool], Any]) -> Captured:
    """Of a value that ``build`` makes of its parts."""

    @contextmanager
    def bound(others: Sequence[Tensor], again: bool) -> Iterator[Any]:
        rest = iter(others)
        with ExitStack() as stack:
            yield build([stack.enter_context(p.bound([next(rest) for _ in p.tensors], again)) for p in parts], again)

    def finish() -> None:
        for part in parts:
            part.finish()

    generators = [x for part in parts for x in part.generators]
    return Captured([x for part in parts for x in part.tensors], bound, finish, generators)


def _of_partial(fn: partial[Any], callers: tuple[Any, ...]) -> Captured:
    values = [fn.func, *fn.args, *fn.keywords.values()]
    split = 1 + len(fn.args)

    def build(new: Sequence[Any], _: bool) -> Any:
        return partial(new[0], *new[1:split], **dict(zip(fn.keywords, new[split:], strict=True)))

    return _together([_of(x, callers) for x in values], build)


def _of_function(fn: FunctionType, callers: tuple[Any, ...]) -> Captured:
    cells = [cell for cell in fn.__closure__ or () if is_filled(cell)]
    defaults, keywords = fn.__defaults__ or (), fn.__kwdefaults__ or {}
    values = [*(cell.cell_contents for cell in cells), *defaults, *keywords.values()]
    split = len(cells), len(cells) + len(defaults)

    def build(new: Sequence[Any], again: bool) -> Any:
        others = [x is not old for x, old in zip(new, values, strict=True)]
        if not again and not any(others):
            return fn
        # what it assigns in forward to other variables of its closure stays assigned
        triples = zip(cells, new, others, strict=False)
        own = {id(cell): CellType(x) if again or other else cell for cell, x, other in triples}
        closure = tuple(own.get(id(cell), cell) for cell in fn.__closure__ or ())
        made = FunctionType(fn.__code__, fn.__globals__, fn.__name__, tuple(new[split[0] : split[1]]), closure)
        made.__kwdefaults__ = dict(zip(keywords, new[split[1] :], strict=True))
        made.__dict__.update(fn.__dict__)
        return made

    inside = _together([_of(x, callers) for x in values], build)
    tensors = [(name, x) for name, value in zip(_names(fn), values, strict=True) for x in _tensors(value)]
    before = [version_of(without_batches(x)) for _, x in tensors]

    def finish() -> None:
        inside.finish()
        after = [version_of(without_batches(x)) for _, x in tensors]
        written = [name for (name, _), old, new in zip(tensors, before, after, strict=True) if old != new]
        _refuse_writes([*map(repr, dict.fromkeys(written))])

    named = [fn.__globals__.get(name) for name in fn.__code__.co_names]
    globals_ = [x for x in named if isinstance(x, torch.Generator)]
    return replace(inside, finish=finish, generators=[*inside.generators, *globals_])


def _names(fn: FunctionType) -> list[str]:
    """Those of the filled variables of its closure, and of the parameters that have defaults."""
    pairs = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    positional = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    with_default = positional[len(positional) - len(fn.__defaults__ or ()) :]
    return [*(name for name, cell in pairs if is_filled(cell)), *with_default, *(fn.__kwdefaults__ or {})]


def _tensors(value: Any) -> list[Tensor]:
    return [] if callable(value) else take_tensors(value)[0]


def is_filled(cell: CellType) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return False


def _of_module(module: nn.Module, fn: Any) -> Captured:
    """Statistics of normalization are written to copies; those of the first run are the new ones."""
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    norms = [name for name, part in module.named_modules() if part.training and _has_statistics(part)]
    kept = {name: x.clone() if name.rpartition(".")[0] in norms else x for name, x in buffers.items()}
    copied = [name for name, x in kept.items() if x is not buffers[name]]
    before = {name: version_of(without_batches(x)) for name, x in buffers.items()}
    after: dict[str, Tensor] = {}

    @contextmanager
    def bound(others: Sequence[Tensor], again: bool) -> Iterator[Any]:
        given = dict(zip([*params, *kept], others, strict=True))
        given |= {name: given[name].clone() for name in copied}
        if not again:  # forward reads the other buffers themselves, and what it writes to them is found
            others_own = [n for n, x in buffers.items() if n not in copied and not is_differentiated([x])]
            given = {name: x for name, x in given.items() if name not in others_own}
        with Swap("remat", module, given, keep=not again).running():
            yield fn
            if not again:
                after.update(module.named_buffers())

    def finish() -> None:
        same = [_is_same(x, before[name], after[name]) for name, x in buffers.items()]
        _refuse_writes(
            [f"buffer {n!r}" for n, unchanged in zip(buffers, same, strict=True) if not unchanged and n not in copied]
        )
        with torch.no_grad():
            for name in copied:
                buffers[name].copy_(after[name])

    return Captured([*params.values(), *kept.values()], bound, finish, generators_in(module))


def _has_statistics(module: nn.Module) -> bool:
    return any(name == "running_mean" for name, _ in module.named_buffers(recurse=False))


def _is_same(x: Tensor, version: int, after: Tensor) -> bool:
    return after is x and version_of(without_batches(x)) == version


def _refuse_writes(names: Sequence[str]) -> None:
    problems = [f"{name}: written to by the function, which is run again in backward" for name in names]
    advice = "Pass buffers as arguments and return their new values: fs.apply(module, params, buffers, x) does."
    reject("remat", problems, advice)
