"""What torch is doing around a call: the questions it has no public answer to (tests/test_surroundings.py watches)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import (
    _current_graph_task_id,
    _DisableFuncTorch,
    _set_throw_on_mutable_data_ptr,
    _will_engine_execute_node,
)
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch._C._functorch import (
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
)
from torch.autograd.graph import _engine_run_backward
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as torch_pytree

_BEFORE_ALL_OTHERS = 2**62


def in_transform() -> bool:
    """Whether a ``torch.func`` transform or ``torch.compile`` sees what is computed here."""
    return maybe_current_level() is not None or torch.compiler.is_compiling()


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


def refuse_pointers(tensor: Tensor) -> None:
    """Have code below Python that asks ``tensor`` for its memory raise, and not read from address 0."""
    _set_throw_on_mutable_data_ptr(tensor)


def torch_node(cls: type) -> torch_pytree.NodeDef | None:
    """How ``torch.func`` takes a container of type ``cls`` apart, where somebody told it; torch has no public way."""
    return torch_pytree.SUPPORTED_NODES.get(cls)


def hooks_of(tensor: Tensor) -> list[str]:
    """How the hooks on ``tensor`` were registered, which autograd runs and nobody can ask for in public."""
    hooks = {"register_hook": "_backward_hooks", "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks"}
    return [name for name, attribute in hooks.items() if getattr(tensor, attribute, None)]


def being_traced() -> bool:
    """Whether ``make_fx`` (and with it ``torch.func.linearize``) records what is computed here, to run it later."""
    return get_proxy_mode() is not None


def differentiate_at_once(tensors: Iterable[Tensor]) -> None:
    """Have backward go through the node that made ``tensors`` as soon as all their gradients are there.

    Of nodes that are ready, autograd takes the one made last; what is made before the model runs would come after all
    of the model, with every full gradient alive until then.
    """
    for node in {tensor.grad_fn for tensor in tensors}:
        if node is not None:
            node._set_sequence_nr(_BEFORE_ALL_OTHERS)  # pyright: ignore[reportAttributeAccessIssue]


def backward_pass() -> int | None:
    """The number of the backward pass that runs in this thread, or ``None`` in forward."""
    task = _current_graph_task_id()
    return None if task == -1 else task


def takes_own_weights(rnn: nn.RNNBase) -> None:
    """Have ``rnn`` keep its own weights, and no more those that it was last called with."""
    rnn._update_flat_weights()


def own_weights_again(tensors: Mapping[str, object]) -> None:
    """Called by ``functional_call`` at its end: have RNNs of its module, known by ``tensors``, keep no others' weights.

    An RNN keeps a list of the weights that it was last called with, where ``functional_call`` does not put its own back
    and whatever made them lives on. Which module it was, is known from the stack alone.
    """
    paths = [name.rpartition(".")[0] for name in tensors if name.endswith("weight_ih_l0")]
    frame = sys._getframe(2) if paths else None
    if frame is None or frame.f_globals.get("__name__") != "torch.nn.utils.stateless":
        return
    module = frame.f_locals.get("module")
    for path in paths:
        with suppress(AttributeError):  # of another model: functional_call has more to say about that
            rnn = module.get_submodule(path) if isinstance(module, nn.Module) else None
            if isinstance(rnn, nn.RNNBase):
                takes_own_weights(rnn)


def backward_comes_to(node: Any) -> bool:
    """Whether the backward pass that runs in this thread has come to ``node``, or will."""
    return _will_engine_execute_node(node)


def has_compiled() -> bool:
    """Whether ``torch.compile`` may have compiled anything that has a gradient, in this process."""
    return "torch._functorch.aot_autograd" in sys.modules


def gradients(outputs: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """``torch.autograd.grad(outputs, inputs, seeds)``, seen by the function modes around, which that would suspend."""
    grads = _engine_run_backward(
        tuple(outputs), tuple(seeds), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]


def checkpointed_regions() -> list[Any]:
    """The regions of ``torch.utils.checkpoint`` whose forward runs in this thread, outermost first.

    A region's ``recompute_fn`` is what backward will call. Those with ``use_reentrant=True`` are not among them.
    """
    return [held["frame"] for held in _hooks_of_checkpoint("_checkpoint_hook")]


def recomputed_region() -> Any | None:
    """The innermost region of ``torch.utils.checkpoint`` that backward is recomputing in this thread."""
    regions = [held["target_frame_ref"]() for held in _hooks_of_checkpoint("_recomputation_hook")]
    return regions[-1] if regions else None


def _hooks_of_checkpoint(name: str) -> list[dict[str, Any]]:
    """What the hooks of class ``name`` close over, outermost first; torch tells no more than the innermost hook."""
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
    pack = getattr(pack, "__wrapped__", pack)  # torch hides some from its compiler
    where = getattr(pack, "__module__", ""), getattr(pack, "__qualname__", "")
    return where == ("torch.utils.checkpoint", f"{name}.__init__.<locals>.pack_hook")


def _closed_over(pack: Any) -> dict[str, Any]:
    pack = getattr(pack, "__wrapped__", pack)
    cells = zip(pack.__code__.co_freevars, pack.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def reentrant_checkpoint() -> FrameType | None:
    """Where the innermost ``torch.utils.checkpoint`` with ``use_reentrant=True`` runs its forward, without gradients.

    Torch keeps no record of it but the stack.
    """
    if torch.is_grad_enabled() or backward_pass() is not None:
        return None
    return next((frame for frame in _callers() if _is_at(frame, _REENTRANT)), None)


def swapped_around_checkpoint() -> Iterator[Mapping[str, Any]]:
    """What each ``functional_call`` around the innermost checkpoint has put into its module; and what that was given.

    The stack is torch's only record of it.
    """
    inside = True
    for frame in _callers():
        inside = inside and not _is_at(frame, _CHECKPOINT)
        if not inside and _is_at(frame, _FUNCTIONAL_CALL):
            yield frame.f_locals["parameters_and_buffers"]


def given_to_checkpoint() -> Any:
    """The function that the innermost checkpoint runs, and its arguments."""
    held = next((f.f_locals for f in _callers() if _is_at(f, _CHECKPOINT)), {})
    return held.get("function"), held.get("args", ()), held.get("kwargs", {})


_CHECKPOINT = "torch.utils.checkpoint", "checkpoint"
_REENTRANT = "torch.utils.checkpoint", "forward"
_FUNCTIONAL_CALL = "torch.nn.utils.stateless", "_functional_call"


def _callers() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_at(frame: FrameType, place: tuple[str, str]) -> bool:
    return frame.f_code.co_name == place[1] and frame.f_globals.get("__name__") == place[0]


def refused_checkpoint(error: BaseException) -> bool:
    """Whether ``error`` is torch's word that a transform of ``torch.func`` cannot run ``torch.utils.checkpoint``."""
    modules = [str(name) for name, _ in _raised_at(error)]
    inside = "torch.utils.checkpoint" in modules
    below = modules[len(modules) - modules[::-1].index("torch.utils.checkpoint") :] if inside else []
    return below[:1] in (["torch.autograd.graph"], ["torch.autograd.function"]) and all(
        name.startswith("torch.") for name in below
    )


def refused_reentrant(error: BaseException) -> bool:
    """Whether ``error`` is torch's word that ``use_reentrant=True`` knows no backward but ``backward()``."""
    return _raised_at(error)[-1] == ("torch.utils.checkpoint", "backward") and "use_reentrant=True" in str(error)


def _raised_at(error: BaseException) -> list[tuple[Any, str]]:
    places, trace = [], error.__traceback__
    while trace is not None:
        places.append((trace.tb_frame.f_globals.get("__name__"), trace.tb_frame.f_code.co_name))
        trace = trace.tb_next
    return places
