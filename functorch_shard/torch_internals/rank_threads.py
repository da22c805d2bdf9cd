"""What torch keeps for a thread, which the threads of ranks inherit, and for the process, which they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, overrides
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from .transforms import forward_level_held


def inherited(device: torch.device) -> Callable[[tuple[type, ...]], AbstractContextManager[Any]]:
    """Return a context, for other threads, with the grad mode, autocast, modes and stream of this thread.

    Dispatch modes of the classes that it is called with are left out. Modes are not entered again, as some count how
    often they are. Backward stays in the thread that calls it: a device's thread would wait for one rank, and could not
    run the backward of the others.
    """
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    cached = torch.is_autocast_cache_enabled()
    kinds = [kind for kind in {"cpu", device.type} - {"meta"} if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    functions, dispatch = overrides._get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    stream = None if device.type in ("cpu", "meta") else torch.accelerator.current_stream()

    @contextmanager
    def entered(left_out: tuple[type, ...]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))  # first: it sets the others
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, True, cached))
            if stream is not None:
                torch.accelerator.set_stream(stream)
            for mode in functions:
                overrides._push_mode(mode)
                stack.callback(overrides._pop_mode)
            for mode in dispatch:
                if not isinstance(mode, left_out):
                    _push_mode(mode)
                    stack.callback(_pop_mode)
            yield

    return entered


def around_threads(run: Callable[[], None]) -> None:
    """Call ``run``, whose threads use forward mode and dispatch modes, which torch counts for the process.

    Forward mode has one level for all threads, at whose end every tangent is lost. This jvp holds it until the last
    thread has ended; a jvp inside of another one does not end it. The mode restores what those of threads that end in
    another order than they began leave behind.
    """
    # Torch 2.11 without CUDA reads a guard of the first thread with fake tensors after that thread has ended, and
    # crashes. So the thread that starts the others is the first.
    torch._C._ensureCUDADeviceGuardSet()

    def hold(x: Tensor) -> Tensor:
        with forward_level_held():
            run()
        return x

    zero = torch.zeros(())
    with _Restoring():
        torch.func.jvp(hold, (zero,), (zero,))


class _Restoring(TorchDispatchMode):
    """A mode without effect on what threads compute and compile."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def parametrizations_are_cached() -> bool:
    """Return whether ``parametrize.cached`` is entered, by any thread; there is no public getter."""
    return parametrize._cache_enabled > 0
