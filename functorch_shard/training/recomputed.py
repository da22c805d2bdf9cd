"""The derivatives of a function that save its inputs and run it again.

Note [Remat]: the function runs on inputs that are detached at every level, and one Function puts the results into the
graph of each. The derivative of such a function, in either mode, is a function of the same inputs, and is treated
alike: a derivative of any order saves inputs. Such a function is a ``Program``: tensors in, tensors out, and everything
else as it was at the first call: also context variables, which an autograd thread of a device does not have.

A program is run again inside of other levels than at first: a vmap that has ended is done anew around it, with the same
randomness; one that has begun since, such as that over the rows of a Jacobian, draws no random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..collectives.boundary import anchors_here, averaged_behind, has_mean_behind, here, new_boundary, no_boundary
from ..torch_internals import lowering
from ..torch_internals.autograd import gradients_or_none, leaves_behind
from ..torch_internals.lowering import active_transforms, constants, in_common, is_differentiated
from ..torch_internals.transforms import in_transform

Results = Sequence["Tensor | None"]


@dataclass(frozen=True, eq=False)
class Program:
    """A function of tensors that is run again.

    Args:
        run: from tensors to tensors; ``None`` for a result that is zero.
        transforms: those that were active at the first call, ``None`` for those of now.
        averages: whether it gathers, and so may take the mean over ranks in backward: Note [Boundary].
        kept: the positions of the results that are differentiated.
        batched: names of batched tensors that are not inputs, so that it cannot run outside of their vmap.
    """

    run: lowering.Run
    transforms: lowering.Transforms | None = None
    averages: bool = False
    kept: tuple[int, ...] = ()
    batched: Sequence[str] = ()

    def results(self, tensors: Sequence[Tensor]) -> list[Any]:
        results = self.run(tensors)
        return [results[i] for i in self.kept]


@dataclass(frozen=True, eq=False)
class FirstRun:
    """Results without a graph, which of them depend on differentiated inputs, and on which of these."""

    inputs: Sequence[Tensor]
    results: list[Tensor]
    depends: Sequence[bool]
    used: Sequence[bool]
    has_anchors: bool  # Note [Unused units]
    on_others: bool  # whether results depend on tensors that need a gradient and are not inputs

    def attached(self, program: Program) -> list[Tensor]:
        """Return the results in the graph of the inputs that they depend on; where there are anchors, with one more."""
        device = self.inputs[self.used.index(True) if any(self.used) else 0].device

        def masked(results: Results) -> list[Tensor | None]:
            kept = [x if depends else None for x, depends in zip(results, self.depends, strict=True)]
            return [*kept, torch.empty(0, device=device) if self.has_anchors else None]

        pairs = zip(self.inputs, constants(self.inputs), self.used, strict=True)
        inputs = [x if used else constant for x, constant, used in pairs]
        program = replace(program, run=lambda tensors, run=program.run: masked(run(tensors)))
        *graph, anchor = _attached(program, masked(self.results), inputs)
        if anchor is not None and (outer := anchors_here()) is not None:
            outer.append(anchor)
        return [x if new is None else new for x, new in zip(self.results, graph, strict=True)]


def first_run(run: Callable[[Sequence[Tensor]], list[Tensor]], inputs: Sequence[Tensor]) -> FirstRun:
    """Run on constants, and look at a graph of this run only, which is freed."""
    wanted, by_gradient = [i for i, x in enumerate(inputs) if is_differentiated([x])], torch.is_grad_enabled()
    num_results: list[int] = []

    def anchored(tensors: Sequence[Tensor]) -> list[Tensor]:
        with new_boundary() as boundary:
            results = run(tensors)
        num_results.append(len(results))
        return [*results, *boundary.take_anchors()]

    ran = _recorded(anchored, constants(inputs), wanted, in_transform())
    results, depends = ran.results[: num_results[0]], ran.depends[: num_results[0]]
    if in_transform():
        on_others = is_differentiated(results)
    else:
        on_others = (by_gradient and ran.on_others) or lowering.has_tangents(results)
    uses = dict(zip(wanted, ran.used, strict=True))
    if lowering.in_forward_mode():  # which goes through torch.no_grad() too, where no graph is recorded
        depends, uses = [x.is_floating_point() or x.is_complex() for x in results], dict.fromkeys(wanted, True)
    results = [x.detach() for x in results]
    used = [uses.get(i, False) for i in range(len(inputs))]
    return FirstRun(inputs, results, depends, used, any(ran.depends[num_results[0] :]), on_others)


def _rematerialized(program: Program, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the results of ``program``; their derivatives run it again."""
    known = active_transforms() if program.transforms is None else program.transforms
    return _attached(program, lowering.run_in(known, program.run, constants(tensors)), tensors)


def _attached(program: Program, results: Results, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return ``results`` of ``program``, which ran on constants, in the graph of ``tensors`` at every level."""
    kept = tuple(i for i, x in enumerate(results) if x is not None and (x.is_floating_point() or x.is_complex()))
    if not kept or not is_differentiated(tensors):
        return [*results]
    again = _Again.apply(replace(program, kept=kept), len(kept), *(results[i] for i in kept), *tensors)
    differentiated = dict(zip(kept, again, strict=True))
    return [differentiated.get(i, x) for i, x in enumerate(results)]


class _Again(Function):
    """Results that were computed, as those of a program on inputs. What it saves is these inputs."""

    @staticmethod
    def forward(program: Program, num_results: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in tensors[:num_results])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.program, ctx.num_results, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.num_results :])
        ctx.save_for_forward(*tensors[ctx.num_results :])
        ctx.set_materialize_grads(False)
        ctx.averages, ctx.boundary, ctx.transforms = ctx.program.averages, here(), active_transforms()
        ctx.context = copy_context()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.context.copy().run(_backward, ctx, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        inputs, tangents = ctx.saved_tensors, tangents[2 + ctx.num_results :]
        given = [i for i, tangent in enumerate(tangents) if tangent is not None]
        pushed = replace(ctx.program, run=partial(_pushed, ctx.program, len(inputs), given))
        return tuple(_rematerialized(pushed, [*inputs, *(tangents[i] for i in given)]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: Program, num_results: int, *tensors: Tensor) -> Any:
        dims = in_dims[2:]
        of_results, of_inputs = dims[:num_results], dims[num_results:]
        known, inside = program.transforms, (*active_transforms(), ("Vmap", info.batch_size))
        randomness = info.randomness if known is None or in_common(inside, known) == inside else "same"
        run = lowering.batched(program.results, of_inputs, of_results, info.batch_size, randomness)
        run = partial(_refuse_batched, program.batched) if program.batched else run
        program = replace(program, run=run, kept=tuple(range(num_results)))
        return _Again.apply(program, num_results, *tensors), of_results


def _refuse_batched(names: Sequence[str], _: Any) -> Any:
    raise RuntimeError(
        f"remat: a derivative outside of a vmap runs the function again, which closes over tensors that are batched "
        f"there: {', '.join(names)}. Pass them as arguments."
    )


def _backward(ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
    inputs, first = ctx.saved_tensors, 2 + ctx.num_results
    given = [i for i, grad in enumerate(grads) if grad is not None]
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[first:]) if needed]
    if not given:
        return (None,) * len(ctx.needs_input_grad)
    by_grad = ctx.boundary is not None and ctx.boundary.reached
    edges: Any = ctx.next_functions[ctx.num_results :] if ctx.averages and not by_grad else ()
    behind = [i for i, (node, _) in enumerate(edges) if has_mean_behind(node)]
    known = ctx.transforms if ctx.program.transforms is None else in_common(ctx.transforms, ctx.program.transforms)
    run = partial(_transposed, ctx.program, len(inputs), wanted, given, behind, by_grad)
    results = _rematerialized(replace(ctx.program, run=run, transforms=known), [*inputs, *(grads[i] for i in given)])
    by_input = dict(zip(wanted, results, strict=True))
    return *(None,) * first, *(by_input.get(i) for i in range(len(inputs)))


def _pushed(program: Program, num_inputs: int, given: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the tangents of the results, from the inputs and the tangents of those that are ``given``."""
    inputs, tangents = tensors[:num_inputs], tensors[num_inputs:]

    def of(*primals: Tensor) -> tuple[Tensor, ...]:
        return tuple(program.results(_with_others(inputs, given, primals)))

    return [*lowering.tangents_of(of, [inputs[i] for i in given], tangents)]


def _transposed(
    program: Program,
    num_inputs: int,
    wanted: Sequence[int],
    given: Sequence[int],
    behind: Sequence[int],
    by_grad: bool,
    tensors: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the gradients of the ``wanted`` inputs, from the inputs and the gradients of the ``given`` results.

    Args:
        behind: the inputs behind which another mean is taken.
        by_grad: whether ``fs.grad`` takes the mean of this one, or the gathers do.
    """
    inputs, grads = tensors[:num_inputs], tensors[num_inputs:]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        with new_boundary() if by_grad else no_boundary() as boundary:
            results = program.results(tensors)
        anchors = [] if boundary is None else boundary.take_anchors()  # Note [Unused units]
        return [*(results[i] for i in given), *anchors]

    again = is_differentiated(tensors)
    # where it can be without torch.func, in which dropout of a tensor that is not contiguous draws other numbers
    ran = _recorded(run, inputs, wanted, in_transform() or (again and program.averages), again)
    seeds = [*grads, *(torch.ones_like(x) for x in ran.results[len(grads) :])]
    leaves = [leaf for i, leaf in zip(wanted, ran.leaves, strict=True) if i in behind]
    with averaged_behind({id(leaf): leaf for leaf in leaves}):
        return ran.pull([seed for seed, depends in zip(seeds, ran.depends, strict=True) if depends])


@dataclass(frozen=True, eq=False)
class _Recorded:
    """Results of a run whose graph begins at ``leaves``: which depend on any, which of these are used, and others."""

    results: list[Tensor]
    leaves: Sequence[Tensor]
    depends: list[bool]
    used: list[bool]
    on_others: bool
    pull: Callable[[Sequence[Tensor]], list[Tensor | None]]  # of gradients of the results that depend


def _recorded(
    run: Callable[[Sequence[Tensor]], list[Tensor]],
    inputs: Sequence[Tensor],
    wanted: Sequence[int],
    by_transform: bool,
    again: bool = False,
) -> _Recorded:
    """Run on ``inputs`` with leaves at ``wanted``; ``again``: gradients are differentiated in turn."""
    noted: list[Any] = []

    def of(*leaves: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        for x in leaves:
            if x.is_leaf:
                x.grad_dtype = None  # as fs.grad has it, Note [Boundary]; autograd casts what is returned
        results = run(_with_others(inputs, wanted, leaves))
        behind = leaves_behind(results)
        used = [id(x) in behind for x in leaves]
        noted[:] = leaves, [x.requires_grad for x in results], used, len(behind) > sum(used)
        return (*(x for x in results if x.requires_grad), torch.zeros(())), results

    if by_transform:
        ran: Any = torch.func.vjp(of, *(inputs[i] for i in wanted), has_aux=True)

        def pull(seeds: Sequence[Tensor]) -> list[Tensor | None]:
            grads = ran[1]((*seeds, torch.zeros(())), retain_graph=False, create_graph=again)
            return [x if use else None for x, use in zip(grads, noted[2], strict=True)]
    else:
        with torch.enable_grad():
            ran = of(*(_leaf_of(inputs[i], again) for i in wanted))

        def pull(seeds: Sequence[Tensor]) -> list[Tensor | None]:
            return [*gradients_or_none(ran[0][:-1], seeds, noted[0], again)] if seeds else [None] * len(wanted)

    leaves, depends, used, on_others = noted
    return _Recorded(ran[-1], leaves, depends, used, on_others, pull)


def _leaf_of(x: Tensor, again: bool) -> Tensor:
    """Return ``x`` to differentiate with respect to; in its graph, if the gradient is differentiated again."""
    leaf = x.view_as(x) if again else x.detach()
    return leaf if leaf.requires_grad else leaf.requires_grad_()


def _with_others(tensors: Sequence[Tensor], places: Sequence[int], others: Sequence[Tensor]) -> list[Tensor]:
    """Return ``tensors`` with ``others`` at ``places``."""
    replaced = dict(zip(places, others, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(tensors)]
