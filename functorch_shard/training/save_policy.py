"""Which results of operators ``remat`` saves: torch's policies of selective activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from ..errors import reject
from ..torch_internals.lowering import active_transforms
from ..torch_internals.operators import OpOverload

Policy = Callable[..., Any] | Sequence[Any]
Saves = Callable[[Any, Any, Any, Any], bool]  # (result, operator, args, kwargs)

aten = torch.ops.aten
_BATCHED = {aten.mm.default: aten.bmm.default, aten.addmm.default: aten.bmm.default}


def saves_by(policy: Policy) -> Callable[[], Saves]:
    """Whether ``policy``, as ``create_selective_checkpoint_contexts`` takes it, saves a result of what is called here.

    To be called inside of a vmap that ``fn`` runs in: where operators are seen, that level has ended.
    """
    if callable(policy):
        return lambda: lambda result, op, args, kwargs: _is_saved(policy(_context(result), op, *args, **kwargs))
    ops = _operators(policy)
    batched = ops | {_BATCHED[op] for op in ops if op in _BATCHED}

    def listed() -> Saves:
        known = batched if any(name == "Vmap" for name, _ in active_transforms()) else ops
        return lambda result, op, args, kwargs: op in known

    return listed


def context_fn_of(policy: Policy | None) -> dict[str, Any]:
    """The option of ``torch.utils.checkpoint.checkpoint`` for ``policy``."""
    given: Any = policy if policy is None or callable(policy) else [*policy]
    return {} if policy is None else {"context_fn": partial(create_selective_checkpoint_contexts, given)}


def _operators(policy: Sequence[Any]) -> frozenset[Any]:
    wrong = [f"policy: got {op}, a {type(op).__name__}" for op in policy if not isinstance(op, OpOverload)]
    reject("remat", wrong, "A list has operators with their overload: torch.ops.aten.mm.default.", TypeError)
    return frozenset(policy)


def _is_saved(decision: Any) -> bool:
    if isinstance(decision, bool):
        return decision
    if decision in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
        return True
    if decision in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
        return False
    raise ValueError(
        f"remat: policy returned {decision!r}, expected MUST_SAVE, PREFER_SAVE, MUST_RECOMPUTE or PREFER_RECOMPUTE of "
        "torch.utils.checkpoint.CheckpointPolicy, or a bool. To keep what is saved on the CPU, run the function in "
        "torch.autograd.graph.save_on_cpu()."
    )


def _context(result: Any) -> SelectiveCheckpointContext:
    options = {"op_output": result} if _has_output() else {}
    return SelectiveCheckpointContext(is_recompute=False, **options)


@cache
def _has_output() -> bool:
    """Torch 2.13 has it, 2.11 does not."""
    return "op_output" in signature(SelectiveCheckpointContext).parameters
