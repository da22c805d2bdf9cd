"""The first run of a function that is run again: its results, and a graph of it alone, which is let go.

The graph says which results depend on which inputs, and on tensors that are not inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..collectives.boundary import anchors_here, new_boundary
from ..torch_internals.autograd import leaves_behind
from ..torch_internals.lowering import constants, has_tangents, in_forward_mode, is_differentiated
from ..torch_internals.transforms import in_transform
from .recomputed import Program, attached, with_others


@dataclass(frozen=True, eq=False)
class FirstRun:
    """Results without a graph, and which of them depend on inputs that are differentiated, and on which of these."""

    results: list[Tensor]
    depend: list[bool]
    used: list[bool]
    on_others: bool  # whether some depend on tensors that are not inputs
    has_anchors: bool  # Note [Unused units]
    device: torch.device

    def attached(self, program: Program, tensors: Sequence[Tensor], saved: Sequence[Tensor] = ()) -> list[Tensor]:
        """The results in the graph, where an input that none of them depends on does not occur.

        The program gets ``saved``, which are constants, behind the inputs.

        Where the function has anchors it gets one itself, so that it is run again on every rank.
        """
        pairs = zip(tensors, constants(tensors), self.used, strict=True)
        inputs = [*(x if used else constant for x, constant, used in pairs), *saved]
        *graph, anchor = attached(replace(program, run=lambda x: self._masked(program.run(x))), self._masked(), inputs)
        if anchor is not None and (outer := anchors_here()) is not None:
            outer.append(anchor)
        return [x if new is None else new for x, new in zip(self.results, graph, strict=True)]

    def _masked(self, results: Sequence[Tensor | None] | None = None) -> list[Tensor | None]:
        """The results that depend on an input, and the anchor."""
        pairs = zip(self.results if results is None else results, self.depend, strict=True)
        anchor = torch.empty(0, device=self.device) if self.has_anchors else None
        return [*(x if depends else None for x, depends in pairs), anchor]


def first_run(run: Callable[[Sequence[Tensor]], list[Tensor]], tensors: Sequence[Tensor]) -> FirstRun:
    """Run on constants, and record a graph of this run alone."""
    wanted = [i for i, x in enumerate(tensors) if is_differentiated([x])]
    record = _record_in_transform if in_transform() else _record
    results, depend, used, on_others, has_anchors = record(run, constants(tensors), wanted)
    if in_forward_mode():  # which goes through torch.no_grad() too, where no graph is recorded
        depend, used = [x.is_floating_point() or x.is_complex() for x in results], [True for _ in wanted]
    uses = dict(zip(wanted, used, strict=True))
    in_use = [uses.get(i, False) for i in range(len(tensors))]
    return FirstRun(results, depend, in_use, on_others, has_anchors, tensors[wanted[0]].device)


Recorded = tuple[list[Tensor], list[bool], list[bool], bool, bool]


def _record(run: Any, inputs: Sequence[Tensor], wanted: Sequence[int]) -> Recorded:
    by_gradient = torch.is_grad_enabled()
    with torch.enable_grad(), new_boundary() as boundary:
        leaves = [inputs[i].detach().requires_grad_() for i in wanted]
        results = run(with_others(inputs, wanted, leaves))
    anchors = [x for x in boundary.take_anchors() if x.requires_grad]  # let go here: their nodes know the boundary
    behind = leaves_behind([*results, *anchors])
    used = [id(x) in behind for x in leaves]
    on_others = (by_gradient and len(behind) > sum(used)) or has_tangents(results)
    return [x.detach() for x in results], [x.requires_grad for x in results], used, on_others, bool(anchors)


def _record_in_transform(run: Any, inputs: Sequence[Tensor], wanted: Sequence[int]) -> Recorded:
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
    return results, depend, used, is_differentiated(results), False
