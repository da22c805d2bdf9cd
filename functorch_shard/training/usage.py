"""Check that a loss, and its backward, use the parameters that it is differentiated with respect to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any
from weakref import ref

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import reject
from ..layout.trees import Sharded, is_node
from ..sharding.gather import gather
from ..sharding.overlapped_means import Place
from ..torch_internals.autograd import leaves_behind, nodes, nodes_behind, strided_read, was_compiled
from ..torch_internals.tensors import hooks_of
from ..torch_internals.transforms import without_batches
from .differentiated_leaves import Differentiated

_ADVICE = (
    "model(x) uses the module's own parameters, which are not trained. Gather the parameters and pass them: "
    "functional_call(model, fs.gather(params), (x,)), or fs.apply. Leave out of argnums what the loss is not meant to "
    "depend on."
)


def unused_arguments(
    fn: Callable[..., Any], value: Tensor, given: Differentiated, inputs: Sequence[Tensor]
) -> dict[int, str]:
    """Find the ``Sharded`` and ``Full`` arguments without a leaf that ``value`` depends on: position to message.

    Args:
        fn: the differentiated function, for the message.
        value: its result, inside of the transform that differentiates it.
        given: the arguments to differentiate with respect to.
        inputs: their leaves, as the function was called with them.
    """
    rest = iter(inputs)
    problems = {}
    for i, wanted in given.wanted.items():
        tensors = list(islice(rest, sum(wanted)))
        if tensors and (kind := _parameters_in(given.args[i])) and not depends_on(value, tensors):
            name = getattr(fn, "__name__", type(fn).__name__)
            problems[i] = f"args[{i}]: the result of {name} does not depend on this {kind}"
    return problems


def refuse_unused(problems: Iterable[str]) -> None:
    """Raise if there are any problems of :func:`unused_arguments`."""
    reject("grad", list(problems), _ADVICE)


def is_unused(tree: Any, reduced: bool) -> bool:
    """Whether all gradients in ``tree`` are zero; if they were ``reduced``, -0.0: Note [Unused units] in unused.py."""
    leaves = [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
    parts = [torch.view_as_real(x) if x.is_complex() else x for x in leaves]
    return not any(bool((x.ne(0) | ~x.signbit()).any() if reduced else x.any()) for x in parts)


def depends_on(value: Tensor, inputs: Iterable[Tensor]) -> bool:
    """Whether backward from ``value`` would reach one of ``inputs``: a traversal of the graph up to the first."""
    wanted = {id(x): x for x in inputs}
    makers = {x.grad_fn for x in wanted.values()}
    if id(value) in wanted:
        return True
    return any(node in makers or id(getattr(node, "variable", None)) in wanted for node in nodes(value.grad_fn))


def _parameters_in(arg: Any) -> str:
    """The class of the first ``Sharded`` or ``Full`` in ``arg``, or an empty string."""
    leaves = optree.tree_leaves(arg, is_leaf=is_node, none_is_leaf=True)
    return next((type(leaf).__name__ for leaf in leaves if is_node(leaf)), "")


def refuse_strided(graph: Iterable[Any], places: Iterable[Place | None]) -> None:
    """Raise if ``as_strided`` of a plain gathered parameter, a view of its unit's buffer, reads another parameter.

    Args:
        graph: the nodes of autograd behind the result.
        places: those of the differentiated shards.
    """
    reads = [read for node in graph if (read := strided_read(node)) is not None]
    buffers = [place[1].buffers[place[0]] for place in places if place is not None and reads]
    slots = {tuple(buffer.split_sizes): buffer.slots for buffer in buffers}
    reject(
        "grad",
        [
            f"{slots[sizes][part // 2].name!r}: as_strided reads elements {first} to {last} of a buffer"
            for sizes, part, first, last in reads
            if sizes in slots and not sum(sizes[:part]) <= first <= last < sum(sizes[: part + 1])
        ],
        _STRIDED,
    )


_STRIDED = (
    "They are another parameter's: plain gathered parameters are views of the buffer of their unit, and as_strided "
    "counts from its start. Write functorch_shard.materialize(w).as_strided(...), or start from w.storage_offset()."
)


def graph_of(value: Tensor) -> list[Any]:
    """Return the nodes that ``value``, below batches, depends on; none if it has no values."""
    value = without_batches(value)
    return [*nodes(value.grad_fn)] if type(value) is Tensor else []


def leaves_of(graph: Iterable[Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that the nodes of ``graph`` use and ``inputs`` do not depend on."""
    users = [node for node in graph if not getattr(node, "keeps_unused_inputs", False)]
    found = [getattr(behind, "variable", None) for node in users for behind in nodes_behind(node)]
    own = leaves_behind([x for x in map(without_batches, inputs) if type(x) is Tensor])
    return [*{id(x): x for x in found if x is not None and id(x) not in own}.values()]


def refuse_hidden(leaves: Iterable[Tensor], grads: Sequence[Tensor], places: Sequence[Place | None]) -> None:
    """Raise if ``leaves`` of a value stand in for an argument.

    One is a module's own parameter of the shape of a gathered one whose gradient is zero: it was read after
    ``functional_call`` had put it back. One has no values. One has a hook, which may call ``backward()`` and would not
    run.

    Cost:
        An all-gather of each buffer with a parameter that has the shape of such a leaf.
    """
    leaves = [*leaves]
    meta = [x for x in leaves if x.is_meta and not any(grad.is_meta for grad in grads)]
    reject("grad", [f"a parameter of shape {tuple(x.shape)} on the meta device is used" for x in meta], _META)
    hooked = [x for x in leaves if not isinstance(x, nn.Parameter) and hooks_of(x)]
    reject("grad", [f"a tensor of shape {tuple(x.shape)} that is not an argument has a hook" for x in hooked], _HOOKED)
    own = {(tuple(x.shape), x.dtype) for x in leaves if isinstance(x, nn.Parameter)}
    late: list[str] = []
    for grad, place in zip(grads, places, strict=True) if own else ():
        key, layout = place or ("", None)
        slots = [slot for slot in layout.buffers[key].slots if (slot.shape, slot.dtype) in own] if layout else []
        if layout and slots:
            full = gather(
                Sharded({key: grad}, layout.select({other: other == key for other in layout.buffers})), lazy=False
            )
            zero = [slot for slot in slots if not without_batches(full[slot.name]).any()]
            late += [f"{s.name!r}: no gradient, and a module's own parameter of shape {s.shape} is used" for s in zero]
    reject("grad", late, _LATE)


_META = (
    "torch computes with it all the same, from memory that nobody wrote. model.to('meta') unties tied parameters, and "
    "functional_call replaces one of them. Use functorch_shard.bind(model, params)(...), which ties them again."
)
_HOOKED = (
    "fs.grad does not run hooks of tensors that it does not differentiate (GradCache calls backward() in one). Use "
    "backward(): loss(params).backward() with fs.bind(model, params), whose parameters such hooks use."
)
_LATE = (
    "functional_call puts the module's own parameters back when forward returns; what is read later (by a closure, a "
    "distribution, a lazy property) is these. Use functorch_shard.bind(model, params)(...), which keeps its parameters."
)


def own_parameters_refused(value: Tensor) -> AbstractContextManager[object]:
    """Return a context for the backward of ``value`` that refuses a module's own parameters that forward did not use.

    ``functional_call`` puts them back when forward returns. What backward runs again (``torch.utils.checkpoint`` in a
    model, adjoint solvers, hooks) finds them, and the gradient would be that at other values, or zero.
    Not where forward was compiled: under a mode ``torch.compile`` compiles another graph, and saves other tensors.
    """
    return nullcontext() if was_compiled(value) else _OwnRefused(value)


class _OwnRefused(TorchFunctionMode):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self._value = ref(value)  # asynchronous collectives keep the modes they were started under
        self._used: dict[int, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and _requires_grad(result):
            for x in _flat((*args, *(kwargs or {}).values())):
                if isinstance(x, nn.Parameter) and x.requires_grad and not self._was_used(x):
                    raise RuntimeError(_own_in_backward(x))
        return result

    def _was_used(self, parameter: nn.Parameter) -> bool:
        if self._used is None:
            value = self._value()
            assert value is not None, "whoever differentiates it holds it"
            self._used = leaves_behind([value])
        return id(parameter) in self._used


def _own_in_backward(x: nn.Parameter) -> str:
    return (
        f"grad: backward differentiates a module's own parameter of shape {tuple(x.shape)}, {x.dtype}, which forward "
        "did not use. functional_call puts the module's own parameters back when it returns, so what backward runs "
        "again (torch.utils.checkpoint in a model, torchdiffeq's odeint_adjoint, reversible layers) finds these. Write "
        "functorch_shard.bind(model, params)(...) in place of functional_call(model, gather(params), (...)): it keeps "
        "its parameters. model.to('meta') after shard frees the model's own, and makes any use of them an error."
    )


def _requires_grad(result: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in _flat(result))


def _flat(x: Any) -> list[Any]:
    return [z for y in x for z in _flat(y)] if isinstance(x, (list, tuple)) else [x]
