"""What torch is doing around a call: the questions it has no public answer to (tests/test_surroundings.py watches)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C import _current_graph_task_id, _set_throw_on_mutable_data_ptr
from torch._C._functorch import maybe_current_level
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_BEFORE_ALL_OTHERS = 2**62


def in_transform() -> bool:
    """Whether a ``torch.func`` transform or ``torch.compile`` sees what is computed here."""
    return maybe_current_level() is not None or torch.compiler.is_compiling()


def refuse_pointers(tensor: Tensor) -> None:
    """Have code below Python that asks ``tensor`` for its memory raise, and not read from address 0."""
    _set_throw_on_mutable_data_ptr(tensor)


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
