"""Derivatives: the graph of autograd, the running backward pass and transforms of ``torch.func``.

A Function here has a backward with the context variables of its forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from functools import partial, wraps
from threading import RLock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C import (
    _current_autograd_node,  # see in_backward_of_product
    _current_graph_task_id,  # see backward_pass
    _DisableFuncTorch,
    _get_dispatch_mode,  # see being_traced
    _is_multithreading_enabled,  # its setter is public
    _TorchDispatchModeKey,
    _will_engine_execute_node,
)
from torch._C._autograd import _profiler_enabled
from torch._C._dynamo import eval_frame
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    unwrap_if_dead,
)
from torch._C._functorch import _add_batch_dim as add_batch_dim
from torch._functorch import eager_transforms  # counts nested jvps, and has the switch of autograd_by_hand
from torch._functorch.pyfunctorch import coerce_cinterpreter  # the level of a transform, to read and to leave
from torch.autograd import forward_ad
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import _engine_run_backward  # see gradients_or_none
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # satellites have modes of their own
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as active_modes

from ..running import RUN

Fn = TypeVar("Fn", bound=Callable[..., Any])
Leaves = dict[int, Tensor]  # of the graph of a value, by id
_BEFORE_ALL_OTHERS = 2**62
_TRACERS = (_TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL)
# What Dynamo does with each frame that begins, None outside of compiled functions; torch.compiler.is_compiling is true
# only while it traces. Without this, what it compiles would take lazy tensors. A builtin: it has no frame of its own.
frame_compiler: Callable[[], Any] = eval_frame.get_eval_frame_callback
# Builtins too: the active transforms of torch.func, outermost first, None outside of all; and whether torch profiles.
in_transform: Callable[[], Any] = get_interpreter_stack
profiler_enabled: Callable[[], bool] = _profiler_enabled
# The id of the backward pass that runs in this thread, or NO_PASS outside of one; no public function tells.
backward_pass: Callable[[], int] = _current_graph_task_id
NO_PASS = -1
# Whether the backward pass that runs in this thread runs a node.
backward_comes_to: Callable[[Any], bool] = _will_engine_execute_node
# A context that disables torch.func for computations with plain tensors: a vmap refuses in-place random operations on
# tensors that its function creates. And one for arithmetic with real numbers, which is not part of what is traced.
outside_transforms: Callable[[], AbstractContextManager[None]] = _DisableFuncTorch
untraced: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
# Has what is traced raise when it runs and the condition is false; torch._check would read it at once.
assert_when_run: Callable[[Tensor, str], None] = torch._assert_async


def eager(fn: Fn, *, recursive: bool = True) -> Fn:
    """Have ``torch.compile`` break its graph at each call of ``fn``; not ``recursive``: compile what ``fn`` calls.

    Traced by Dynamo, a collective's Function would be its forward alone, and its derivative a silent zero.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and frame_compiler() is None:  # nothing is compiled around this
            return fn(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(fn, recursive=recursive))
        return disabled[0](*args, **kwargs)

    return cast(Fn, call)


class Function(torch.autograd.Function):
    """A Function whose backward runs with the context variables of its forward.

    Autograd runs the nodes of a device in threads of its own, to which it carries modes and the levels of torch.func
    and no context variables. In the caller's thread those of the caller are hidden too, so that both are alike.
    """

    refusal = ""  # what backward and jvp raise, of a Function that has no derivative

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing for backward."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.refusal:
            cls.backward = cls.jvp = staticmethod(partial(_refuse, cls.refusal))
        cls.setup_context = staticmethod(_keeping_context(cls.setup_context))
        cls.backward = staticmethod(_in_kept_context(cls.backward))

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Torch's, which outside of transforms also binds ``args`` to the signature of forward, at every call."""
        if in_transform():
            watcher = RUN.get().watcher
            return watcher.apply(super().apply, args) if watcher else super().apply(*args)
        alive = [unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in args]
        above: Any = super(torch.autograd.Function, cls)
        return above.apply(*alive)


def _refuse(text: str, ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(text)


def _keeping_context(setup_context: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(setup_context)
    def kept(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.context = copy_context()
        setup_context(ctx, inputs, output)

    return kept


def _in_kept_context(backward: Callable[..., Any]) -> Callable[..., Any]:
    @eager  # a backward() in a compiled function would have Dynamo compile what waits for messages
    @wraps(backward)
    def inside(ctx: Any, *grads: Any) -> Any:
        return ctx.context.copy().run(backward, ctx, *grads)  # a copy: one context cannot be entered twice at a time

    return inside


def differentiate_at_once(tensors: Iterable[Tensor]) -> None:
    """Have backward run the nodes that made ``tensors`` as soon as all of their gradients are available.

    Of the nodes that are ready, autograd runs the one that was made last. A node that was made before the model ran
    would run after the whole model, and every full gradient would stay alive until then. If torch ignored the number,
    values would be right and memory high; tests/sharding/test_memory_on_ranks.py would fail.
    """
    for x in tensors:
        if x.grad_fn is not None:
            x.grad_fn._set_sequence_nr(_BEFORE_ALL_OTHERS)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """A context without inference mode; ``inference_mode(False)`` also has backward run in threads of its devices."""
    in_threads = _is_multithreading_enabled()
    with torch.inference_mode(False), torch.autograd.set_multithreading_enabled(in_threads):
        yield


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


def leaves_behind(outputs: Sequence[Tensor]) -> Leaves:
    """The leaves that ``outputs`` depend on in the graph of this level, by id."""
    found = [node.variable for node in nodes(*(x.grad_fn for x in outputs)) if hasattr(node, "variable")]
    return {id(x): x for x in (*found, *(x for x in outputs if x.requires_grad and x.grad_fn is None))}


def leaves_used_by(value: Tensor) -> Leaves:
    """Return the leaves that ``value`` depends on, without inputs that a node has only because it may use them."""
    users = [node for node in nodes(value.grad_fn) if not getattr(node, "keeps_unused_inputs", False)]
    found = [getattr(behind, "variable", None) for node in users for behind in nodes_behind(node)]
    return {id(x): x for x in found if x is not None}


def was_compiled(value: Tensor) -> bool:
    """Return whether a function that ``torch.compile`` made is part of the graph of ``value``."""
    if "torch._functorch.aot_autograd" not in sys.modules:  # nothing has been compiled
        return False
    return any(node.name() == "CompiledFunctionBackward" for node in nodes(value.grad_fn))


def nodes_behind(node: Any) -> list[Any]:
    """The nodes that backward runs after ``node``; ``None`` where the graph ends."""
    return [behind for behind, _ in node.next_functions]


# The backward of these operators has a derivative in forward mode that is right without a graph of it. That of others
# may have none (SiLU, dropout on a device), or a wrong one in silence (linalg.solve, det, slogdet).
_NAMES = """Add Sub Mul Div Neg Pow Sqrt Rsqrt Exp Log Abs Sin Cos Tanh Sigmoid Relu Gelu Softmax LogSoftmax NllLoss
MseLoss NativeLayerNorm Mm Bmm Addmm Dot Mv Embedding Sum Mean Cat Stack Where MaskedFill T Transpose Permute View
UnsafeView ReshapeAlias Expand Squeeze Unsqueeze Clone Select Slice Split SplitWithSizes Unbind AsStrided ToCopy"""
_NEED_NO_GRAPH = {f"{name}Backward{i}" for name in _NAMES.split() for i in range(3)}


def _needs_no_graph(node: Any) -> bool:
    own = hasattr(node, "context")  # a Function of this package
    return own or hasattr(node, "variable") or node.name() in _NEED_NO_GRAPH


def needs_graph(value: Tensor) -> bool:
    """Whether a derivative of ``value``, at the innermost level, may be differentiated, or is taken under vmap.

    Forward mode goes through backward too, where operators allow it; without a graph vmap refuses some kernels of it.
    """
    around = {level.key() for level in levels()[:-1]}
    outside = get_unwrapped(value) if is_functorch_wrapped_tensor(value) else value
    if being_traced() or around - {TransformType.Jvp} or _requires_grad_anywhere(outside):
        return True
    return in_forward_mode() and not all(map(_needs_no_graph, nodes(value.grad_fn)))


def _requires_grad_anywhere(x: Tensor) -> bool:
    """Whether ``x`` or its tangent requires grad, at any level of ``torch.func`` or outside of all."""
    tangent = unpack_dual(x).tangent
    if x.requires_grad or (tangent is not None and _requires_grad_anywhere(tangent)):
        return True
    return is_functorch_wrapped_tensor(x) and _requires_grad_anywhere(get_unwrapped(x))


def in_backward_of_product() -> bool:
    """Whether the backward of a matrix product runs here: it multiplies by what it transposes, and keeps no view of it.

    If torch renames the node, a linear layer makes one more lazy tensor.
    """
    node = _current_autograd_node()
    return node is not None and node.name() in ("AddmmBackward0", "MmBackward0")


def hooks_of(tensor: Tensor) -> list[str]:
    """The methods by which the hooks of ``tensor`` were registered; there is no public getter.

    If torch renames an attribute, hooks that will not run are not refused; a test that registers some fails.
    """
    hooks = {"register_hook": "_backward_hooks", "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks"}
    return [name for name, attribute in hooks.items() if getattr(tensor, attribute, None)]


def levels() -> list[Any]:
    """The active transforms of ``torch.func``, outermost first."""
    return [coerce_cinterpreter(level) for level in in_transform() or ()]


def autograd_by_hand() -> AbstractContextManager[None]:
    """A context in which ``requires_grad_()`` works inside of a derivative of ``torch.func``, as outside of one.

    torch refuses it there, since the flag is lost outside; its own derivatives turn the refusal off with this switch.
    If torch renames it, the import fails.
    """
    return eager_transforms.enable_inplace_requires_grad(True)


def with_outer_tangents() -> AbstractContextManager[object]:
    """A context for the ``jvp`` of a Function that computes: torch runs it without forward mode, at every level.

    Without it the tangents of a jvp around this one are lost in silence: derivatives of every order are tested.
    """
    return forward_ad._set_fwd_grad_enabled(True)


def writable_copy(x: Tensor) -> Tensor:
    """A bitwise copy of ``x`` that is batched at every active level of vmap.

    Batched values can be written to it in place, which vmap refuses for tensors that are not batched.
    """
    batches = [level for level in levels() if level.key() == TransformType.Vmap]
    if not batches:
        return x.clone()
    with outside_transforms():
        mark = torch.zeros([level.batch_size() for level in batches], dtype=torch.bool, device=x.device)
    for level in batches:  # from the outside in
        mark = add_batch_dim(mark, 0, level.level())
    return torch.where(mark, x, x)


def without_batches(x: Tensor) -> Tensor:
    """The values of ``x`` outside of all transforms, with batches as further dims."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def being_traced() -> bool:
    """Whether a tracer records this computation: ``make_fx``, ``torch.func.linearize``, or a compiler's.

    A compiler's sees the program several times, under fake tensors alone at first. If torch traces with another mode,
    what reads values raises under its fake tensors.
    """
    return bool(active_modes()) and any(map(_get_dispatch_mode, _TRACERS))


def traced_as_it_runs() -> bool:
    """Whether what is traced here will run as it is, and not through a compiler."""
    return any(getattr(mode, "for_compiler", True) is False for mode in active_modes())


def traced_for_compiler() -> bool:
    """Whether ``make_fx`` records what is computed here, for something else than to run it as it is."""
    return _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None and not traced_as_it_runs()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which a variable of ``owner``, a module of torch, has another value; it raises if there is none."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def as_under_compiler() -> AbstractContextManager[None]:
    """Have ``torch.optim`` take the arithmetic that it shows to compilers, which reads no tensor on the host.

    If torch reads another flag, a recorded step reads a value, and is refused.
    """
    return replaced(torch.compiler, "_is_compiling_flag", True)


def own_parametrizations() -> AbstractContextManager[None]:
    """A context in which ``parametrize.cached`` keeps what is computed inside alone, and not what was before.

    It knows tensors by their module. Inside, the module has other parameters, or their derivative is another one.
    """
    return replaced(parametrize, "_cache", {})


def in_forward_mode() -> bool:
    """Whether a jvp, or ``torch.autograd.forward_ad``, is active, other than those that only hold their level.

    Torch has no public getter. If its counters moved, tangents would be lost in silence: tested at each kind of level.
    """
    held = RUN.get().held
    return forward_ad._current_level >= 0 and (not held or held < eager_transforms.JVP_NESTING)


def has_tangents(tensors: Sequence[Tensor]) -> bool:
    """Whether any of ``tensors`` has a tangent at this level, which is that of a jvp, or none."""
    return in_forward_mode() and any(unpack_dual(x).tangent is not None for x in tensors)


_ONE_AT_A_TIME = RLock()


@contextmanager
def without_compiling() -> Iterator[None]:
    """A context in which what ``torch.compile`` made runs as it was written, so that modes see each operator.

    The stance belongs to the process: of two threads in here at once, the one that ends last would leave the other's,
    and nothing would be compiled from then on.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet
        yield
        return
    with _ONE_AT_A_TIME, torch.compiler.set_stance("force_eager"):
        yield
