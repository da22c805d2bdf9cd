"""``torch.func`` transforms and tracers that are active around a call, and what is differentiated at any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableFuncTorch, _get_dispatch_mode, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import (
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,
    _unwrap_batched,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_level,
    unwrap_if_dead,
)
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import FuncTorchInterpreter, retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_TRACERS = (_TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL)


class Tracer(TorchDispatchMode):
    """A mode that sees what is traced, also where no mode of torch's does, as Dynamo has fake tensors alone."""


def in_transform() -> bool:
    """Whether a ``torch.func`` transform is active."""
    return maybe_current_level() is not None


def is_watched() -> bool:
    """Whether a dispatch mode, or the profiler, sees what is computed here."""
    return _len_torch_dispatch_stack() > 0 or _profiler_enabled()


def current_level() -> int:
    """The current level of ``torch.func``, from 1; 0 is plain autograd.

    In ``setup_context`` of a Function it is the level whose derivative is being set up.
    """
    return maybe_current_level() or 0


def only_in_jvp() -> bool:
    """Whether the active transforms, of which there is one, are all ``jvp``, and nothing is traced."""
    keys = [level.key() for level in get_interpreter_stack() or ()]
    return bool(keys) and all(key == TransformType.Jvp for key in keys) and not being_traced()


def autograd_by_hand() -> AbstractContextManager[None]:
    """A context in which ``requires_grad_()`` works inside of a derivative of ``torch.func``, as outside of one.

    torch refuses it there, since the flag is lost outside; its own derivatives turn the refusal off with this switch.
    If torch renames it, the import fails.
    """
    return eager_transforms.enable_inplace_requires_grad(True)


def with_outer_tangents() -> AbstractContextManager[object]:
    """A context for the ``jvp`` of a Function that computes: torch runs it without forward mode, at every level.

    Without it the tangents of a jvp around this one are lost in silence.
    """
    return forward_ad._set_fwd_grad_enabled(True)


def requires_grad_anywhere(x: Tensor) -> bool:
    """Whether ``x`` or its tangent requires grad, at any level of ``torch.func`` or outside of all."""
    tangent = unpack_dual(x).tangent
    if x.requires_grad or (tangent is not None and requires_grad_anywhere(tangent)):
        return True
    return is_functorch_wrapped_tensor(x) and requires_grad_anywhere(get_unwrapped(x))


def outside_transforms() -> AbstractContextManager[None]:
    """A context that disables ``torch.func`` transforms for computations with plain tensors.

    A vmap refuses in-place random operations on tensors that its function creates.
    """
    return _DisableFuncTorch()


def marks_every_batch(device: torch.device) -> Tensor | None:
    """A scalar ``False`` that is batched at every active level of vmap; ``None`` if there is none.

    ``torch.where(mark, x, x)`` is a bitwise copy of ``x`` that batched values can be written to in place; vmap refuses
    that for tensors that are not batched.
    """
    levels = [
        (level.level(), CVmapInterpreterPtr(level).batchSize())
        for level in get_interpreter_stack() or ()
        if level.key() == TransformType.Vmap
    ]
    with outside_transforms():
        mark = torch.zeros([size for _, size in levels], dtype=torch.bool, device=device)
    for level, _ in levels:  # from the outside in
        mark = _add_batch_dim(mark, 0, level)
    return mark if levels else None


def without_batches(x: Tensor) -> Tensor:
    """The values of ``x`` outside of all transforms, with batches as further dims."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def being_traced() -> bool:
    """Whether a tracer records this computation: ``make_fx``, ``torch.func.linearize``, or a compiler's.

    A compiler's sees the program several times, under fake tensors alone at first.
    """
    if not _len_torch_dispatch_stack():
        return False
    return any(map(_get_dispatch_mode, _TRACERS)) or any(isinstance(mode, Tracer) for mode in active_modes())


def active_modes() -> Sequence[TorchDispatchMode]:
    """Return the dispatch modes that are entered, outermost first."""
    return _get_current_dispatch_mode_stack()


def being_proxied() -> bool:
    """Return whether ``make_fx`` records this computation as a graph."""
    return _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None


Transforms = tuple[tuple[str, int], ...]
Run = Callable[[Sequence[Tensor]], "list[Tensor | None]"]
_NO_BATCH = -1
_HELD = ContextVar("how many jvps only hold the level of forward mode", default=0)


def active_transforms() -> Transforms:
    """The active transforms of ``torch.func``, outermost first: the name of each, and the size of a vmap's batch."""
    return tuple(
        (level.key().name, CVmapInterpreterPtr(level).batchSize() if level.key() == TransformType.Vmap else _NO_BATCH)
        for level in get_interpreter_stack() or ()
    )


def in_common(a: Transforms, b: Transforms) -> Transforms:
    """The first transforms, as far as ``a`` and ``b`` have the same."""
    differ = (i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other)
    return a[: next(differ, min(len(a), len(b)))]


def is_differentiated(tensors: Sequence[Tensor]) -> bool:
    """Whether what is computed from ``tensors`` here is differentiated, in either mode, at any level."""
    tensors = [unwrap_if_dead(x) for x in tensors]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    interpreter = None if maybe_current_level() is None else retrieve_current_functorch_interpreter()
    if (interpreter is None or interpreter.key() == TransformType.Jvp) and has_tangents(tensors):
        return True
    if interpreter is None:
        return False
    below = [_unwrapped(x, interpreter) for x in tensors]
    # modes at this level do not hold at those below, whose own ones lower() restores
    with torch.enable_grad(), with_outer_tangents(), interpreter.lower():
        return is_differentiated(below)


def in_forward_mode() -> bool:
    """Whether a jvp, or ``torch.autograd.forward_ad``, is active, other than those that only hold their level."""
    held = _HELD.get()
    return forward_ad._current_level >= 0 and (not held or held < eager_transforms.JVP_NESTING)


@contextmanager
def forward_level_held() -> Iterator[None]:
    """A context inside of a jvp whose level is only held, for threads whose contexts are copies of this one."""
    token = _HELD.set(eager_transforms.JVP_NESTING)
    try:
        yield
    finally:
        _HELD.reset(token)


def has_tangents(tensors: Sequence[Tensor]) -> bool:
    """Whether any of ``tensors`` has a tangent at this level, which is that of a jvp, or none."""
    return in_forward_mode() and any(unpack_dual(x).tangent is not None for x in tensors)


def constants(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors`` without their derivatives, at any level."""
    alive = [unwrap_if_dead(x) for x in tensors]
    if maybe_current_level() is not None or in_forward_mode():
        return [x.detach() for x in alive]
    return [x.detach() if x.requires_grad else x for x in alive]  # torch.autograd.functional has batches without detach


def run_in(known: Transforms, run: Run, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """``run(tensors)``, but not inside of a vmap that is not one of the ``known`` transforms.

    That vmap is done here: the elements of its batch, such as the rows of a Jacobian, share their random numbers.
    ``tensors`` are constants.
    """
    active = active_transforms()
    if all(size == _NO_BATCH for _, size in active[len(in_common(active, known)) :]):
        return run(tensors)
    interpreter, (_, size) = retrieve_current_functorch_interpreter(), active[-1]
    if size == _NO_BATCH:
        with interpreter.lower():
            return run_in(known, run, [_unwrapped(x, interpreter) for x in tensors])
    values, dims = zip(*(_unwrap_batched(x, interpreter.level()) for x in tensors), strict=True)
    with interpreter.lower():
        results = run_in(known, batched(run, dims, None, size, "same"), values)
    return [None if x is None else _add_batch_dim(x, 0, interpreter.level()) for x in results]


def batched(
    run: Run, in_dims: Sequence[int | None], out_dims: Sequence[int | None] | None, size: int, randomness: str
) -> Run:
    """``run`` for each element of a batch of ``size``; without ``out_dims`` every result has it in dim 0."""

    def run_batch(tensors: Sequence[Tensor]) -> list[Tensor | None]:
        exist: list[bool] = []

        def one(_: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            results = run(tensors)
            exist[:] = [x is not None for x in results]
            return tuple(x for x in results if x is not None)

        dims: Any = 0 if out_dims is None else tuple(out_dims)
        count = torch.arange(size, device=tensors[0].device)
        results = iter(torch.func.vmap(one, (0, *in_dims), dims, randomness=randomness)(count, *tensors))
        return [next(results) if exists else None for exists in exist]

    return run_batch


def tangents_of(fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
    """The tangents of ``fn`` as ``torch.func.jvp`` returns them, also inside of ``torch.autograd.forward_ad``.

    There ``torch.func.jvp`` would enter a second dual level, unless it is nested in another jvp.
    """
    if not in_forward_mode() or eager_transforms.JVP_NESTING:
        return torch.func.jvp(fn, tuple(inputs), tuple(tangents))[1]
    if maybe_current_level() is not None:
        with eager_transforms.jvp_increment_nesting():
            results = torch.func.jvp(fn, tuple(inputs), tuple(tangents))[1]
        return [unwrap_if_dead(x) for x in results]
    with with_outer_tangents():
        duals = [forward_ad.make_dual(x, tangent) for x, tangent in zip(inputs, tangents, strict=True)]
        pairs = [(x, unpack_dual(x).tangent) for x in fn(*duals)]
    return [torch.zeros_like(x) if tangent is None else tangent for x, tangent in pairs]


def _unwrapped(x: Tensor, interpreter: FuncTorchInterpreter) -> Tensor:
    """``x`` without the wrapper of the level of ``interpreter``, and without those of levels that have ended."""
    x = unwrap_if_dead(x)
    return unwrap_if_dead(get_unwrapped(x)) if maybe_get_level(x) == interpreter.level() else x
