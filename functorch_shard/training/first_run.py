"""The first run of a function that is run again: its results, and a graph of it alone, which is let go.

The graph says which results depend on which inputs, and on tensors that are not inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..collectives.boundary import new_boundary
from ..torch_internals.autograd import leaves_behind
from ..torch_internals.lowering import Run, constants, has_tangents, is_differentiated
from ..torch_internals.transforms import in_transform
from .recomputed import Program, attached, with_others


@dataclass(frozen=True, eq=False)
class FirstRun:
    """Results without a graph, and which of them depend on inputs that are differentiated, and on which of these."""

    results: list[Tensor]
    depend: list[bool]
    used: list[bool]
    on_others: bool  # whether some depend on tensors that are not inputs

    def attached(self, program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results in the graph, where an input that none of them depends on does not occur."""
        pairs = zip(tensors, constants(tensors), self.used, strict=True)
        inputs = [x if used else constant for x, constant, used in pairs]
        program = replace(program, run=partial(_masked, program.run, self.depend))
        masked = [x if depends else None for x, depends in zip(self.results, self.depend, strict=True)]
        graph = attached(program, masked, inputs)
        return [x if new is None else new for x, new in zip(self.results, graph, strict=True)]


def _masked(run: Run, mask: Sequence[bool], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [x if keep else None for x, keep in zip(run(tensors), mask, strict=True)]


def first_run(run: Callable[[Sequence[Tensor]], list[Tensor]], tensors: Sequence[Tensor]) -> FirstRun:
    """Run on constants, and record a graph of this run alone."""
    wanted = [i for i, x in enumerate(tensors) if is_differentiated([x])]
    record = _record_in_transform if in_transform() else _record
    results, depend, used, on_others = record(run, constants(tensors), wanted)
    uses = dict(zip(wanted, used, strict=True))
    return FirstRun(results, depend, [uses.get(i, False) for i in range(len(tensors))], on_others)


def _record(run: Any, inputs: Sequence[Tensor], wanted: Sequence[int]) -> tuple[Any, list[bool], list[bool], bool]:
    by_gradient = torch.is_grad_enabled()
    with torch.enable_grad(), new_boundary():
        leaves = [inputs[i].detach().requires_grad_() for i in wanted]
        results = run(with_others(inputs, wanted, leaves))
    behind = leaves_behind(results)
    used = [id(x) in behind for x in leaves]
    on_others = (by_gradient and len(behind) > sum(used)) or has_tangents(results)
    return [x.detach() for x in results], [x.requires_grad for x in results], used, on_others


def _record_in_transform(
    run: Any, inputs: Sequence[Tensor], wanted: Sequence[int]
) -> tuple[Any, list[bool], list[bool], bool]:
    depend: list[bool] = []
    used: list[bool] = []

    def of(*leaves: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        with new_boundary():
            results = run(with_others(inputs, wanted, leaves))
        behind = leaves_behind(results)
        depend[:], used[:] = [x.requires_grad for x in results], [id(x) in behind for x in leaves]
        dependent = [x for x in results if x.requires_grad]
        return [*dependent, torch.zeros(())], [x for x in results if not x.requires_grad]  # one result at least

    ran: Any = torch.func.vjp(of, *(inputs[i] for i in wanted), has_aux=True)
    kinds = {True: iter(ran[0]), False: iter(ran[2])}
    results = [next(kinds[depends]) for depends in depend]
    return results, depend, used, is_differentiated(results)
