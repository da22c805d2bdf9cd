"""Look through the levels of ``torch.func``: what is differentiated at any of them, and what to run inside of few."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,
    _unwrap_batched,
    get_interpreter_stack,
    get_unwrapped,
    maybe_current_level,
    maybe_get_level,
    unwrap_if_dead,
)
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import FuncTorchInterpreter, retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.autograd.forward_ad import unpack_dual

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
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), interpreter.lower():
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
    with forward_ad._set_fwd_grad_enabled(True):
        duals = [forward_ad.make_dual(x, tangent) for x, tangent in zip(inputs, tangents, strict=True)]
        pairs = [(x, unpack_dual(x).tangent) for x in fn(*duals)]
    return [torch.zeros_like(x) if tangent is None else tangent for x, tangent in pairs]


def _unwrapped(x: Tensor, interpreter: FuncTorchInterpreter) -> Tensor:
    """``x`` without the wrapper of the level of ``interpreter``, and without those of levels that have ended."""
    x = unwrap_if_dead(x)
    return unwrap_if_dead(get_unwrapped(x)) if maybe_get_level(x) == interpreter.level() else x
