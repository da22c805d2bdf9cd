"""Globals of torch's modules that its transforms, tracers and modes set while they run."""

from __future__ import annotations

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
    """The values of these globals when this is made."""

    def __init__(self) -> None:
        self._values: list[Any] = [getattr(module, name) for module, name in NAMES]

    def restore(self) -> None:
        for (module, name), value in zip(NAMES, self._values, strict=True):
            setattr(module, name, value)
        know: Any = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
        if know is not None:  # Dynamo's copy of one of them, since 2.13
            know(_python_dispatch._is_in_any_mode_without_ignore_compile_internals)
