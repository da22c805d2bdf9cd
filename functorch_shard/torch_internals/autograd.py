"""The graph of autograd, the running backward pass, and Functions whose backward has the context of their forward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import wraps
from inspect import Signature, signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _current_graph_task_id, _will_engine_execute_node
from torch.autograd.graph import _engine_run_backward

T = TypeVar("T")
_BEFORE_ALL_OTHERS = 2**62


class Function(torch.autograd.Function):
    """A Function whose backward runs with the context variables of its forward.

    Autograd runs the nodes of a device in threads of its own, to which it carries modes and the levels of torch.func
    and no context variables. In the caller's thread those of the caller are hidden too, so that both are alike.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.setup_context = staticmethod(_keeping_context(cls.setup_context))
        cls.backward = staticmethod(_in_kept_context(cls.backward))


def _keeping_context(setup_context: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(setup_context)
    def kept(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.context = copy_context()
        setup_context(ctx, inputs, output)

    return kept


def _in_kept_context(backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(backward)
    def inside(ctx: Any, *grads: Any) -> Any:
        return ctx.context.copy().run(backward, ctx, *grads)  # a copy: one context cannot be entered twice at a time

    return inside


def differentiate_at_once(tensors: Iterable[Tensor]) -> None:
    """Have backward run the node that made ``tensors`` as soon as all of their gradients are available.

    Of the nodes that are ready, autograd runs the one that was made last. A node that was made before the model ran
    would run after the whole model, and every full gradient would stay alive until then.
    """
    for node in {tensor.grad_fn for tensor in tensors}:
        if node is not None:
            node._set_sequence_nr(_BEFORE_ALL_OTHERS)  # pyright: ignore[reportAttributeAccessIssue]


def signed(forward: T) -> T:
    """``forward`` of a ``Function``, with a signature that ``apply`` need not compute, nor bind arguments to.

    Its parameters have no defaults, which are what ``apply`` binds arguments for, at every call.
    """
    forward.__signature__ = _Positional([*signature(forward).parameters.values()])  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    return forward


class _Positional(Signature):
    """Of a function that is called with all of its arguments, by position."""

    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        return super().bind(*args, **kwargs) if kwargs else _Bound(args)


class _Bound:
    kwargs: Mapping[str, Any] = {}

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args

    def apply_defaults(self) -> None:
        """There are none."""


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """A context without inference mode; ``inference_mode(False)`` also has backward run in threads of its devices."""
    in_threads = torch._C._is_multithreading_enabled()
    with torch.inference_mode(False), torch.autograd.set_multithreading_enabled(in_threads):
        yield


def backward_pass() -> int | None:
    """The id of the backward pass that runs in this thread, or ``None`` outside of one."""
    task = _current_graph_task_id()
    return None if task == -1 else task


def backward_comes_to(node: Any) -> bool:
    """Whether the backward pass that runs in this thread runs ``node``."""
    return _will_engine_execute_node(node)


def gradients_or_none(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor], create_graph: bool = False
) -> Sequence[Tensor | None]:
    """``torch.autograd.grad(outputs, inputs, seeds)``, but with the active function modes, which it would disable.

    ``None`` for inputs that no output depends on.
    """
    how = create_graph, create_graph  # retain_graph, create_graph
    return _engine_run_backward(
        tuple(outputs), tuple(seeds), *how, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )


def nodes(*roots: Any) -> list[Any]:
    """``roots`` and all nodes that they depend on, each once, in depth-first order; ``None`` is skipped."""
    seen, waiting = dict[Any, None](), [*roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            for behind, _ in node.next_functions:
                waiting.append(behind)
    return [*seen]


def leaves_behind(outputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """The leaves that ``outputs`` depend on in the graph of this level, by id."""
    found = [node.variable for node in nodes(*(x.grad_fn for x in outputs)) if hasattr(node, "variable")]
    return {id(x): x for x in (*found, *(x for x in outputs if x.requires_grad and x.grad_fn is None))}


def was_compiled(value: Tensor) -> bool:
    """Return whether a function that ``torch.compile`` made is part of the graph of ``value``."""
    if "torch._functorch.aot_autograd" not in sys.modules:  # nothing has been compiled
        return False
    return any(node.name() == "CompiledFunctionBackward" for node in nodes(value.grad_fn))


def nodes_behind(node: Any) -> list[Any]:
    """The nodes that backward runs after ``node``; ``None`` where the graph ends."""
    return [behind for behind, _ in node.next_functions]


def strided_read(node: Any) -> tuple[tuple[int, ...], int, int, int] | None:
    """Return what ``as_strided`` read in place of a part of a split: sizes, part, first and last element.

    ``None`` of any other node, and where it was given no offset.
    """
    if node.name() != "AsStridedBackward0" or (first := node._saved_storage_offset) is None:
        return None
    view = node.next_functions[0][0]
    split, part = view.next_functions[0] if view is not None and view.name() == "ViewBackward0" else (None, 0)
    steps = zip(node._saved_size, node._saved_stride, strict=True)
    return tuple(getattr(split, "_saved_split_sizes", ())), part, first, first + sum((n - 1) * by for n, by in steps)
