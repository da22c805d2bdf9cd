"""The state of ``torch.utils.checkpoint`` around a call, and which errors it raises for unsupported uses."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)

from .autograd import backward_pass
from .frames import callers, is_at

_CHECKPOINT = "torch.utils.checkpoint", "checkpoint"

_REENTRANT = "torch.utils.checkpoint", "forward"

_FUNCTIONAL_CALL = "torch.nn.utils.stateless", "_functional_call"
_UNTIES = "torch.nn.utils.stateless", "_untie_named_tensors_map"
_REPARAMETRIZES = "torch.nn.utils.stateless", "_reparametrize_module"


def has_compiled() -> bool:
    """Whether ``torch.compile`` may have compiled a function with gradients in this process."""
    return "torch._functorch.aot_autograd" in sys.modules


def checkpointed_regions() -> list[Any]:
    """The regions of ``torch.utils.checkpoint`` whose forward runs in this thread, outermost first.

    Backward calls a region's ``recompute_fn``. Regions with ``use_reentrant=True`` are not included.
    """
    return [held["frame"] for held in _hooks_of_checkpoint("_checkpoint_hook")]


def recomputed_region() -> Any | None:
    """The innermost region of ``torch.utils.checkpoint`` that backward is recomputing in this thread."""
    regions = [held["target_frame_ref"]() for held in _hooks_of_checkpoint("_recomputation_hook")]
    return regions[-1] if regions else None


def may_be_recomputing() -> bool:
    """A fast test: false only if ``recomputed_region`` finds nothing."""
    return _top_saved_tensors_default_hooks(False) is not None


def _hooks_of_checkpoint(name: str) -> list[dict[str, Any]]:
    """The closures of hooks of class ``name``, outermost first; torch exposes the innermost hook only."""
    if _top_saved_tensors_default_hooks(False) is None:
        return []
    hooks: list[Any] = []
    while (top := _top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        _pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        _push_saved_tensors_default_hooks(pack, unpack)
    packs = [pack for pack, _ in reversed(hooks)]
    return [_closed_over(pack) for pack in packs if _is_of(pack, name)]


def _is_of(pack: Any, name: str) -> bool:
    pack = getattr(pack, "__wrapped__", pack)  # torch wraps some for its compiler
    where = getattr(pack, "__module__", ""), getattr(pack, "__qualname__", "")
    return where == ("torch.utils.checkpoint", f"{name}.__init__.<locals>.pack_hook")


def _closed_over(pack: Any) -> dict[str, Any]:
    pack = getattr(pack, "__wrapped__", pack)
    cells = zip(pack.__code__.co_freevars, pack.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def reentrant_checkpoint() -> FrameType | None:
    """The frame of the innermost ``torch.utils.checkpoint`` with ``use_reentrant=True`` that runs its forward.

    Torch does not record it anywhere except on the stack.
    """
    if torch.is_grad_enabled() or backward_pass() is not None:
        return None
    return next((frame for frame in callers() if is_at(frame, _REENTRANT)), None)


def swapped_around_checkpoint() -> Iterator[Mapping[str, Any]]:
    """The tensors that each ``functional_call`` around the innermost checkpoint was called with.

    Torch does not record them anywhere except on the stack.
    """
    inside = True
    for frame in callers():
        inside = inside and not is_at(frame, _CHECKPOINT)
        if not inside and is_at(frame, _FUNCTIONAL_CALL):
            yield frame.f_locals["parameters_and_buffers"]


def given_to_checkpoint() -> Any:
    """The function that the innermost checkpoint runs, and its arguments."""
    held = next((f.f_locals for f in callers() if is_at(f, _CHECKPOINT)), {})
    return held.get("function"), held.get("args", ()), held.get("kwargs", {})


def refused_checkpoint(error: BaseException) -> bool:
    """Whether torch raised ``error`` because a ``torch.func`` transform cannot run ``torch.utils.checkpoint``."""
    modules = [str(name) for name, _ in _raised_at(error)]
    inside = "torch.utils.checkpoint" in modules
    below = modules[len(modules) - modules[::-1].index("torch.utils.checkpoint") :] if inside else []
    if inside and not below:  # from 2.15 on a Function is called without Python
        return "override the setup_context staticmethod" in str(error)
    return below[:1] in (["torch.autograd.graph"], ["torch.autograd.function"]) and all(
        name.startswith("torch.") for name in below
    )


def refused_reentrant(error: BaseException) -> bool:
    """Whether torch raised ``error`` because ``use_reentrant=True`` supports no backward except ``backward()``."""
    return _raised_at(error)[-1] == ("torch.utils.checkpoint", "backward") and "use_reentrant=True" in str(error)


def _raised_at(error: BaseException) -> list[tuple[Any, str]]:
    places, trace = [], error.__traceback__
    while trace is not None:
        places.append((trace.tb_frame.f_globals.get("__name__"), trace.tb_frame.f_code.co_name))
        trace = trace.tb_next
    return places


def may_be_in_checkpoint() -> bool:
    """A fast test: false only if ``checkpointed_regions`` and ``reentrant_checkpoint`` find nothing."""
    if _top_saved_tensors_default_hooks(False) is not None:
        return True
    return not torch.is_grad_enabled() and backward_pass() is None


def swaps_of_functional_call() -> nn.Module | None:
    """The module of the ``functional_call`` that calls the caller: ``copy`` or ``update`` of a mapping.

    Torch copies the mapping before it swaps any tensor, and updates it after all are restored. In between it raises
    for ``strict`` only.
    """
    frame: FrameType | None = sys._getframe(2)
    begins = frame is not None and is_at(frame, _UNTIES)
    frame = frame.f_back if frame is not None and begins else frame
    if frame is None or not is_at(frame, _REPARAMETRIZES):
        return None
    module, given, strict = (frame.f_locals[name] for name in ("module", "parameters_and_buffers", "strict"))
    return None if begins and strict and not _has_exactly(module, given) else module


def _has_exactly(module: nn.Module, names: Iterable[str]) -> bool:
    """Whether these are all tensors of the module, tied ones under any of their names."""
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    given = {id(own.get(name)) for name in names}
    return all(name in own for name in names) and all(id(x) in given for x in own.values())
