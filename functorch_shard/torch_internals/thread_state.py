"""Settings of torch that belong to a thread, for another thread that goes on with the work of this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode


def inherited() -> Callable[[tuple[type, ...]], AbstractContextManager[Any]]:
    """A function that another thread calls: a context with the settings that this thread has now.

    Dispatch modes of the classes that it is called with are left out.

    Grad mode, inference mode, autocast, the default device and all other modes, the device and stream of CUDA. Modes
    are not entered again, as some count how often they are. Backward runs in the thread that calls it on CUDA too:
    torch's thread of a device would wait for one rank, and could not run the backward of the others.
    """
    contexts = [*_of_autograd(), *_of_autocast(), *_of_cuda()]
    functions = _get_current_function_mode_stack()
    dispatch = _get_current_dispatch_mode_stack()

    @contextmanager
    def entered(left_out: tuple[type, ...]) -> Iterator[None]:
        with ExitStack() as stack:
            for make in contexts:
                stack.enter_context(make())
            stack.enter_context(_pushed(functions, _push_function_mode, _pop_function_mode))
            stack.enter_context(_pushed([x for x in dispatch if not isinstance(x, left_out)], _push_mode, _pop_mode))
            yield

    return entered


Make = Callable[[], AbstractContextManager[Any]]


def _of_autograd() -> Sequence[Make]:
    """Inference mode first: it sets the others."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    forward = torch._C._is_fwd_grad_enabled()
    return [
        lambda: torch.inference_mode(inference),
        lambda: torch.set_grad_enabled(grad),
        lambda: forward_ad._set_fwd_grad_enabled(forward),
        lambda: torch.autograd.set_multithreading_enabled(False),
    ]


def _of_autocast() -> Sequence[Make]:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    cached = torch.is_autocast_cache_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    return [lambda kind=kind, dtype=dtype: torch.autocast(kind, dtype, True, cached) for kind, dtype in casts]


def _of_cuda() -> Sequence[Make]:
    if not torch.cuda.is_initialized():
        return []
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    return [lambda: torch.cuda.device(device), lambda: torch.cuda.stream(stream)]


@contextmanager
def _pushed(modes: Sequence[Any], push: Callable[[Any], None], pop: Callable[[], Any]) -> Iterator[None]:
    for mode in modes:
        push(mode)
    try:
        yield
    finally:
        for _ in modes:
            pop()
