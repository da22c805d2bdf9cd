"""The derivatives of a function that save its inputs and run it again.

Note [Remat]: the function runs on inputs that are detached at every level, and one Function puts the results into the
graph of each. The derivative of such a function, in either mode, is a function of the same inputs, and is treated
alike: a derivative of any order saves inputs. Such a function is a ``Program``: tensors in, tensors out, and everything
else as it was at the first call.

A program is run again inside of other levels than at first: a vmap that has ended is done anew around it, with the same
randomness; one that has begun since, such as that over the rows of a Jacobian, draws no random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collectives.sinks import Boundary, gradients_to, has_mean_behind, new_boundary, sink_here
from ..torch_internals.autograd import (
    Function,
    gradients_or_none,
    has_tangents,
    in_forward_mode,
    in_transform,
    leaves_behind,
    nodes,
)
from ..torch_internals.satellites import (
    Run,
    Transforms,
    active_transforms,
    batched,
    constants,
    in_common,
    is_differentiated,
    run_in,
    tangents_of,
)

Tensors = Sequence[Tensor]
Results = Sequence["Tensor | None"]
Attach = Callable[["Program"], "list[Tensor]"]


@dataclass(frozen=True, eq=False)
class Program:
    """A function of tensors that is run again."""

    run: Run  # from tensors to tensors; None for a result that is zero
    transforms: Transforms | None = None  # that were active at the first call; None: those of now
    averages: bool = False  # whether its results depend on gathers, which may take the mean: Note [Boundary]
    kept: tuple[int, ...] = ()  # the positions of the results that are differentiated
    batched: bool = False  # whether tensors that are not inputs are batched: it cannot run outside of their vmap

    def results(self, tensors: Tensors) -> list[Any]:
        results = self.run(tensors)
        return [results[i] for i in self.kept]

    def without_batches(self, tensors: Tensors) -> Any:
        raise RuntimeError(
            "remat: a derivative outside of a vmap runs the function again, which closes over tensors that are batched "
            "there. Pass them as arguments."
        )


def first_run(run: Callable[[Tensors], list[Tensor]], inputs: Tensors) -> tuple[list[Tensor], bool, Attach]:
    """Run on constants, and look at a graph of this run only, which is freed.

    Returns:
        The results, without a graph; whether they depend on a tensor that needs a gradient and is not an input; and
        what puts them into the graph of the inputs that they depend on. A function with anchors gets one there, so that
        it is run again on every rank: Note [Unused units].
    """
    wanted, by_gradient = [i for i, x in enumerate(inputs) if is_differentiated([x])], torch.is_grad_enabled()
    anchors: list[Tensor] = []

    def anchored(tensors: Tensors) -> list[Tensor]:
        with new_boundary() as boundary:
            results = run(tensors)
        anchors[:] = boundary.take_anchors()
        return [*results, *anchors]

    ran = _recorded(anchored, constants(inputs), wanted, in_transform())
    has_anchors, num = any(x.requires_grad for x in anchors), len(ran.results) - len(anchors)
    anchors.clear()  # their nodes know the boundary
    others = is_differentiated(ran.results[:num]) if in_transform() else by_gradient and ran.on_others
    others = others or (not in_transform() and has_tangents(ran.results[:num]))
    results, depends, used = [x.detach() for x in ran.results[:num]], ran.depends, {*wanted}
    if in_forward_mode():  # which goes through torch.no_grad() too, where no graph is recorded
        depends = [x.is_floating_point() or x.is_complex() for x in results]
    else:
        used = {i for i, use in zip(wanted, ran.used, strict=True) if use}
    device = inputs[min(used or wanted)].device

    def masked(results: Results) -> list[Tensor | None]:
        kept = [x if depends[i] else None for i, x in enumerate(results)]
        return [*kept, torch.empty(0, device=device)] if has_anchors else kept

    def attach(program: Program) -> list[Tensor]:
        tensors = [x if i in used else constants([x])[0] for i, x in enumerate(inputs)]
        masking = replace(program, run=lambda tensors: masked(program.run(tensors)), averages=ran.averages)
        graph = _attached(masking, masked(results), tensors)
        if has_anchors and (outer := sink_here().anchors) is not None and graph[-1] is not None:
            outer.append(graph[-1])
        return [x if new is None else new for x, new in zip(results, graph, strict=False)]

    return results, others, attach


def _rematerialized(program: Program, tensors: Tensors) -> list[Tensor | None]:
    """Return the results of ``program``; their derivatives run it again."""
    known = active_transforms() if program.transforms is None else program.transforms
    return _attached(program, run_in(known, program.run, constants(tensors)), tensors)


def _attached(program: Program, results: Results, tensors: Tensors) -> list[Tensor | None]:
    """Return ``results`` of ``program``, which ran on constants, in the graph of ``tensors`` at every level."""
    kept = tuple(i for i, x in enumerate(results) if x is not None and (x.is_floating_point() or x.is_complex()))
    if not kept or not is_differentiated(tensors):
        return [*results]
    again = _Again.apply(replace(program, kept=kept), len(kept), *(results[i] for i in kept), *tensors)
    return _with_others(results, kept, again)


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
        ctx.averages, ctx.sink, ctx.transforms = ctx.program.averages, sink_here(), active_transforms()
        ctx.keeps_unused_inputs = True  # in forward mode it is not known which ones are used

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        program, inputs, first = ctx.program, ctx.saved_tensors, 2 + ctx.num_results
        given = [i for i, grad in enumerate(grads) if grad is not None]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[first:]) if needed]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        by_grad = not ctx.sink.averages  # fs.grad takes the mean, and not the gathers
        edges: Any = ctx.next_functions[ctx.num_results :] if program.averages and not by_grad else ()
        behind = [i for i, (node, _) in enumerate(edges) if has_mean_behind(node)]  # where another mean is taken
        known = ctx.transforms if program.transforms is None else in_common(ctx.transforms, program.transforms)

        def run_given(tensors: Tensors) -> list[Tensor]:
            with new_boundary() if by_grad else gradients_to() as boundary:
                results = program.results([_MeanBehind.apply(x) if i in behind else x for i, x in enumerate(tensors)])
            anchors = boundary.take_anchors() if isinstance(boundary, Boundary) else []  # Note [Unused units]
            return [*(results[i] for i in given), *anchors]

        def transpose(tensors: Tensors) -> list[Tensor | None]:
            inputs, grads = tensors[: len(tensors) - len(given)], tensors[len(tensors) - len(given) :]
            again = is_differentiated(tensors)
            # where it can be without torch.func, whose dropout of a tensor that is not contiguous draws other numbers
            ran = _recorded(run_given, inputs, wanted, in_transform() or (again and program.averages), again)
            seeds = [*grads, *(torch.ones_like(x) for x in ran.results[len(given) :])]
            return ran.pull([seed for seed, depends in zip(seeds, ran.depends, strict=True) if depends])

        transposed = replace(program, run=transpose, transforms=known)
        results = _rematerialized(transposed, [*inputs, *(grads[i] for i in given)])
        return *(None,) * first, *_with_others([None] * len(inputs), wanted, results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        program, inputs, tangents = ctx.program, ctx.saved_tensors, tangents[2 + ctx.num_results :]
        given = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def push(tensors: Tensors) -> list[Tensor | None]:
            inputs, tangents = tensors[: len(tensors) - len(given)], tensors[len(tensors) - len(given) :]
            of = lambda *primals: tuple(program.results(_with_others(inputs, given, primals)))  # noqa: E731
            return [*tangents_of(of, [inputs[i] for i in given], tangents)]

        return tuple(_rematerialized(replace(program, run=push), [*inputs, *(tangents[i] for i in given)]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: Program, num_results: int, *tensors: Tensor) -> Any:
        of_results, of_inputs = in_dims[2 : 2 + num_results], in_dims[2 + num_results :]
        known, inside = program.transforms, (*active_transforms(), ("Vmap", info.batch_size))
        randomness = info.randomness if known is None or in_common(inside, known) == inside else "same"
        run = batched(program.results, of_inputs, of_results, info.batch_size, randomness)
        run = program.without_batches if program.batched else run
        return _Again.apply(
            replace(program, run=run, kept=tuple(range(num_results))), num_results, *tensors
        ), of_results


class _MeanBehind(Function):
    """The identity of an input of a program, with a mean that is taken behind it in another graph."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.averages = True

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return _MeanBehind.apply(x), in_dims[0]


class _Recorded(NamedTuple):
    """Results of a run, and what they depend on."""

    results: list[Tensor]
    depends: list[bool]  # which of them depend on leaves of its graph
    used: list[bool]  # which of these leaves are used
    on_others: bool  # whether other leaves are
    averages: bool  # whether gathers are
    pull: Callable[[Tensors], list[Tensor | None]]  # of gradients of the results that depend


def _recorded(
    run: Callable[[Tensors], list[Tensor]], inputs: Tensors, wanted: Sequence[int], by_func: bool, again: bool = False
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
        averages = any(getattr(node, "averages", False) for node in nodes(*(x.grad_fn for x in results)))
        noted[:] = leaves, [x.requires_grad for x in results], used, len(behind) > sum(used), averages
        return (*(x for x in results if x.requires_grad), torch.zeros(())), results

    if by_func:
        ran: Any = torch.func.vjp(of, *(inputs[i] for i in wanted), has_aux=True)

        def pull(seeds: Tensors) -> list[Tensor | None]:
            grads = ran[1]((*seeds, torch.zeros(())), retain_graph=False, create_graph=again)
            return [x if use else None for x, use in zip(grads, noted[2], strict=True)]
    else:
        with torch.enable_grad():
            leaves = [(inputs[i].view_as(inputs[i]) if again else inputs[i].detach()) for i in wanted]
            ran = of(*(x.requires_grad_() for x in leaves))

        def pull(seeds: Tensors) -> list[Tensor | None]:
            return [*gradients_or_none(ran[0][:-1], seeds, noted[0], again)] if seeds else [None] * len(wanted)

    _, depends, used, on_others, averages = noted
    return _Recorded(ran[-1], depends, used, on_others, averages, pull)


def _with_others(tensors: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Return ``tensors`` with ``others`` at ``places``."""
    replaced = dict(zip(places, others, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(tensors)]
