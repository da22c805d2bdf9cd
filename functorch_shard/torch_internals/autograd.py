"""The graph of autograd and the backward pass that runs: questions that have no public answer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _current_graph_task_id, _will_engine_execute_node
from torch.autograd.graph import _engine_run_backward

from .frames import callers

_BEFORE_ALL_OTHERS = 2**62


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


def backward_comes_to(node: Any) -> bool:
    """Whether the backward pass that runs in this thread has come to ``node``, or will."""
    return _will_engine_execute_node(node)


def gradients(outputs: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """``torch.autograd.grad(outputs, inputs, seeds)``, seen by the function modes around, which that would suspend."""
    grads = _engine_run_backward(
        tuple(outputs), tuple(seeds), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]


def nodes(*roots: Any) -> Iterator[Any]:
    """``roots`` and the nodes behind them, each once; what a root has last comes first. ``None`` has no graph."""
    seen, waiting = set(), [*roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += nodes_behind(node)


def nodes_behind(node: Any) -> list[Any]:
    """Those that backward goes on to from ``node``, with ``None`` where it ends."""
    return [behind for behind, _ in node.next_functions]


def differentiates_twice() -> str | None:
    """Which function of ``torch.autograd.functional`` that differentiates its own gradient runs, in whatever thread.

    Backward of what is on another device runs in a thread of that device, below nothing that called it.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    frames = [frame for top in sys._current_frames().values() for frame in callers(top)]
    names = [frame.f_code.co_name for frame in frames if frame.f_globals.get("__name__") == "torch.autograd.functional"]
    return next((name for name in names if name in ("jvp", "hvp", "vhp", "hessian")), None)
