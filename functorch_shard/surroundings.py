"""What torch is doing around a call: the questions it has no public answer to (tests/test_surroundings.py watches)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import (
    _current_graph_task_id,
    _DisableFuncTorch,
    _set_throw_on_mutable_data_ptr,
    _will_engine_execute_node,
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
                rnn._update_flat_weights()


def backward_comes_to(node: Any) -> bool:
    """Whether the backward pass that runs in this thread has come to ``node``, or will."""
    return _will_engine_execute_node(node)
