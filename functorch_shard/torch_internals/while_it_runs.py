"""What torch's transforms and tracers change for the whole process while they run, and put back at their end.

Note [While it runs]: a thread that takes turns may wait inside of a transform or a tracer, and others run then, or
begin one of their own. They see what holds outside of it: these are exchanged at both ends of a turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch

_OF_ALL_VERSIONS = (
    (eager_transforms, "JVP_NESTING"),  # how deep jvp is nested
    (forward_ad, "_current_level"),  # -1 outside of forward mode
    (_symbolic_trace, "CURRENT_PATCHER"),  # whose replacements Dynamo undoes
    (_symbolic_trace, "_is_fx_tracing_flag"),
    (proxy_tensor, "_CURRENT_MAKE_FX_TRACER"),
    (proxy_tensor, "CURRENT_DECOMPOSITION_TABLE"),  # of torch 2.11 and before
    (_python_dispatch, "_is_in_torch_dispatch_mode"),
    (_python_dispatch, "_is_in_non_infra_torch_dispatch_mode"),
    (_python_dispatch, "_is_in_any_mode_without_ignore_compile_internals"),
)
NAMES = [(module, name) for module, name in _OF_ALL_VERSIONS if hasattr(module, name)]


class Globals:
    """The globals of torch's modules as they are outside of what this thread runs, or, in other turns, inside of it."""

    def __init__(self) -> None:
        self._values = [getattr(module, name) for module, name in NAMES]

    def exchange(self) -> None:
        now = [getattr(module, name) for module, name in NAMES]
        for (module, name), value in zip(NAMES, self._values, strict=True):
            setattr(module, name, value)
        _have_dynamo_know()
        self._values = now


def _have_dynamo_know() -> None:
    """Dynamo has a copy of one of them since 2.13: where it is true, nothing is compiled."""
    if hasattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals"):
        _python_dispatch.set_is_in_mode_without_ignore_compile_internals(
            _python_dispatch._is_in_any_mode_without_ignore_compile_internals
        )


class Replaced:
    """The functions that tracers of this thread have replaced, such as ``nn.Module.__call__``."""

    def __init__(self) -> None:
        self._patchers: list[Any] = []  # outermost first

    @contextmanager
    def of(self, patcher: Any) -> Iterator[None]:
        """A context in which ``patcher`` replaces functions."""
        self._patchers.append(patcher)
        try:
            yield
        finally:
            self._patchers.remove(patcher)

    def put_away(self) -> None:
        for patcher in reversed(self._patchers):
            for patch in reversed(patcher.patches_made):
                patch.revert()

    def put_back(self) -> None:
        for patcher in self._patchers:
            for patch in patcher.patches_made:
                patch.patch()
