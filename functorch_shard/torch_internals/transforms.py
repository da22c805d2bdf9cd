"""Transforms of ``torch.func`` and tracers that are active around a call."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._C import _DisableFuncTorch, _len_torch_dispatch_stack
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
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def in_transform() -> bool:
    """Whether a ``torch.func`` transform or ``torch.compile`` sees what is computed here."""
    return maybe_current_level() is not None or torch.compiler.is_compiling()


def is_watched() -> bool:
    """Whether a dispatch mode, or the profiler, sees what is computed here."""
    return _len_torch_dispatch_stack() > 0 or _profiler_enabled()


def current_level() -> int:
    """The level of ``torch.func`` that is at work, from 1; 0 is plain autograd.

    In the ``setup_context`` of a Function: the one whose derivative is being prepared.
    """
    return maybe_current_level() or 0


def outside_transforms() -> AbstractContextManager[None]:
    """While it lasts, what is computed from plain tensors is plain, as if no ``torch.func`` transform were around.

    A vmap refuses to draw random numbers into tensors of its own function's making.
    """
    return _DisableFuncTorch()


def marks_every_batch(device: torch.device) -> Tensor | None:
    """A false scalar that is batched at every level of vmap around; ``None`` when there is none.

    ``torch.where(mark, x, x)`` is a copy of ``x`` that any batched value can be written to in place, bitwise and in any
    dtype; vmap refuses that on what is not batched itself.
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
    """All the values of ``x``, in every transform around, with batches as further dims."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def being_traced() -> bool:
    """Whether ``make_fx`` (and with it ``torch.func.linearize``) records what is computed here, to run it later."""
    return get_proxy_mode() is not None
