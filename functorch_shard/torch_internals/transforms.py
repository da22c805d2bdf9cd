"""``torch.func`` transforms and tracers that are active around a call."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._C import _DisableFuncTorch, _get_dispatch_mode, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import (
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
)
from torch._functorch.eager_transforms import enable_inplace_requires_grad
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


def in_forward_mode_only() -> bool:
    """Whether the active transforms, of which there is one, are all ``jvp``, and nothing is traced."""
    keys = [level.key() for level in get_interpreter_stack() or ()]
    return bool(keys) and all(key == TransformType.Jvp for key in keys) and not being_traced()


def autograd_by_hand() -> AbstractContextManager[None]:
    """A context in which ``requires_grad_()`` works inside of a derivative of ``torch.func``, as outside of one.

    torch refuses it there, since the flag is lost outside; its own derivatives turn the refusal off with this switch.
    If torch renames it, the import fails.
    """
    return enable_inplace_requires_grad(True)


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
    modes = _get_current_dispatch_mode_stack
    return any(map(_get_dispatch_mode, _TRACERS)) or any(isinstance(mode, Tracer) for mode in modes())
