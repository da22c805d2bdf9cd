"""Check that a loss, and its backward, use the parameters that it is differentiated with respect to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import reject
from ..layout.layout import Layout, select_buffers
from ..layout.trees import Sharded
from ..sharding.gather import gather
from ..torch_internals.autograd import hooks_of, without_batches

_ADVICE = (
    "model(x) uses the module's own parameters, which are not trained. Gather the parameters and pass them: "
    "functional_call(model, fs.gather(params), (x,)), or fs.apply. Leave out of argnums what the loss is not meant to "
    "depend on."
)


def refuse_unused(fn: Callable[..., Any], kinds: Mapping[int, str], leaves: Iterable[Tensor]) -> None:
    """Raise if the result of ``fn`` depends on ``leaves`` of no argument, and not on arguments given by position."""
    _refuse_hooked(leaves if kinds else ())
    name = getattr(fn, "__name__", type(fn).__name__)
    problems = [f"args[{i}]: the result of {name} does not depend on this {kind}" for i, kind in kinds.items()]
    reject("grad", problems, _ADVICE)


def is_unused(tree: Any, reduced: bool) -> bool:
    """Whether all gradients in ``tree`` are zero; if they were ``reduced``, -0.0: Note [Unused units]."""
    leaves = [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
    parts = [torch.view_as_real(x) if x.is_complex() else x for x in leaves]
    return not any(bool((x.ne(0) | ~x.signbit()).any() if reduced else x.any()) for x in parts)


def refuse_hidden(
    leaves: Iterable[Tensor], grads: Sequence[Tensor], places: Sequence[tuple[str, Layout] | None]
) -> None:
    """Raise if ``leaves`` of a value, which are of no argument, stand in for an argument.

    One is a module's own parameter of the shape of a gathered one whose gradient is zero, which is gathered to see it:
    it was read late. One was tied. One has no values. One has a hook, which may call ``backward()`` and would not run.
    """
    leaves = [*leaves]
    meta = [x for x in leaves if x.is_meta and not any(grad.is_meta for grad in grads)]
    reject("grad", [f"a parameter of shape {tuple(x.shape)} on the meta device is used" for x in meta], _META)
    _refuse_hooked(leaves)
    own = {(tuple(x.shape), x.dtype) for x in leaves if isinstance(x, nn.Parameter)}
    tied = {id(x()) for _, layout in filter(None, places) for x in layout.derived.get("tied", ())}
    late = [f"a tied parameter of shape {tuple(x.shape)} is the model's own" for x in leaves if id(x) in tied]
    for grad, place in zip(grads, places, strict=True) if own else ():
        if place is None:
            continue
        key, layout = place
        if slots := [slot for slot in layout.buffers[key].slots if (slot.shape, slot.dtype) in own]:
            only = select_buffers(layout, {other: other == key for other in layout.buffers})
            full = gather(Sharded({key: grad}, only), lazy=False)
            zero = [slot for slot in slots if not without_batches(full[slot.name]).any()]
            late += [f"{s.name!r}: no gradient, and a module's own parameter of shape {s.shape} is used" for s in zero]
    reject("grad", late, _LATE)


def _refuse_hooked(leaves: Iterable[Tensor]) -> None:
    hooked = [x for x in leaves if not isinstance(x, nn.Parameter) and hooks_of(x)]
    reject("grad", [f"a tensor of shape {tuple(x.shape)} that is not an argument has a hook" for x in hooked], _HOOKED)


_META = (
    "torch computes with it all the same, from memory that nobody wrote. model.to('meta') unties tied parameters, and "
    "functional_call replaces one of them. Use functorch_shard.bind(model, params)(...), which ties them again."
)
_HOOKED = (
    "fs.grad does not run hooks of tensors that it does not differentiate (GradCache calls backward() in one). Use "
    "backward(): loss(params).backward() with fs.bind(model, params), whose parameters such hooks use."
)
_LATE = (
    "functional_call puts the module's own parameters back when forward returns. What is read later is these: by a "
    "closure, a distribution or a lazy property, and in backward by torch.utils.checkpoint in a model, adjoint solvers "
    "and reversible layers. Use functorch_shard.bind(model, params)(...), which keeps its parameters."
)


@dataclass(eq=False)
class OwnRefused(TorchFunctionMode):
    """A mode for a backward pass that refuses a module's own parameters that forward did not use."""

    used: frozenset[int]  # ids, and no tensors: asynchronous collectives keep the modes they were started under

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: Any = (args, kwargs) if torch.is_grad_enabled() else ()
        leaves = optree.tree_leaves(given)
        own = [x for x in leaves if isinstance(x, nn.Parameter) and x.requires_grad and id(x) not in self.used]
        result: Any = own  # torch.utils.checkpoint ends a recomputation by an error in the last operator that saves
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            if own and any(getattr(x, "requires_grad", False) for x in optree.tree_leaves(result)):
                what = f"a module's own parameter of shape {tuple(own[0].shape)}, {own[0].dtype}"
                raise RuntimeError(f"grad: backward differentiates {what}, which forward did not use. {_LATE}")
        return result
