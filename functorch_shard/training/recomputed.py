"""The derivatives of a function that keep its inputs alone, and run it again.

Note [Remat]: the function runs on inputs that are detached at every level, and one Function puts the results into the
graph of each. The derivative of such a function, in either mode, is a function of the same inputs, and is treated
alike: a derivative of any order keeps inputs. Such a function is a ``Program``: tensors in, tensors out, and everything
else as it was at the first call.

A program is run again inside of other levels than at first: a vmap that has ended is done anew around it, with the same
randomness; one that has begun since, such as that over the rows of a Jacobian, draws no random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..collectives.boundary import averaged_behind, has_mean_behind, here, new_boundary, no_boundary
from ..torch_internals.autograd import gradients_or_none, leaves_behind
from ..torch_internals.lowering import (
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
from ..torch_internals.transforms import in_transform


@dataclass(frozen=True, eq=False)
class Program:
    """What is run again: ``run``, whose results at ``kept`` are differentiated.

    Args:
        run: from tensors to tensors; ``None`` for a result that is zero.
        transforms: those that were active at the first call, ``None`` for those of now.
        averages: whether it gathers, and so may take the mean over ranks in backward: Note [Boundary].
        kept: which results are differentiated.
    """

    run: Run
    transforms: Transforms | None = None
    averages: bool = False
    kept: tuple[int, ...] = ()

    def results(self, tensors: Sequence[Tensor]) -> list[Any]:
        results = self.run(tensors)
        return [results[i] for i in self.kept]


def rematerialized(program: Program, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The results of ``program``, whose derivatives run it again."""
    known = active_transforms() if program.transforms is None else program.transforms
    return attached(program, run_in(known, program.run, constants(tensors)), tensors)


def attached(program: Program, results: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """``results`` of ``program``, which ran on constants, as results of ``tensors`` in the graph of every level."""
    kept = tuple(i for i, x in enumerate(results) if x is not None and (x.is_floating_point() or x.is_complex()))
    if not kept or not is_differentiated(tensors):
        return [*results]
    again = _Again.apply(replace(program, kept=kept), len(kept), *(results[i] for i in kept), *tensors)
    differentiated = dict(zip(kept, again, strict=True))
    return [differentiated.get(i, x) for i, x in enumerate(results)]


class _Again(Function):
    """Results that were computed, as those of a program on inputs. What it keeps is these inputs."""

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

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs, first = ctx.saved_tensors, 2 + ctx.num_results
        given = [i for i, grad in enumerate(grads) if grad is not None]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[first:]) if needed]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        by_grad = ctx.boundary is not None and ctx.boundary.reached
        edges: Any = ctx.next_functions[ctx.num_results :] if ctx.averages and not by_grad else ()
        behind = [i for i, (node, _) in enumerate(edges) if has_mean_behind(node)]
        known = ctx.transforms if ctx.program.transforms is None else in_common(ctx.transforms, ctx.program.transforms)
        transposed = Program(_Transpose(ctx.program, len(inputs), wanted, given, behind, by_grad), known, ctx.averages)
        results = rematerialized(transposed, [*inputs, *(grads[i] for i in given)])
        by_input = dict(zip(wanted, results, strict=True))
        return *(None,) * first, *(by_input.get(i) for i in range(len(inputs)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        inputs, tangents = ctx.saved_tensors, tangents[2 + ctx.num_results :]
        given = [i for i, tangent in enumerate(tangents) if tangent is not None]
        pushed = replace(ctx.program, run=partial(_push, ctx.program, len(inputs), given), kept=())
        return tuple(rematerialized(pushed, [*inputs, *(tangents[i] for i in given)]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: Program, num_results: int, *tensors: Tensor) -> Any:
        dims = in_dims[2:]
        of_results, of_inputs = dims[:num_results], dims[num_results:]
        known, inside = program.transforms, (*active_transforms(), ("Vmap", info.batch_size))
        randomness = info.randomness if known is None or in_common(inside, known) == inside else "same"
        run = batched(program.results, of_inputs, of_results, info.batch_size, randomness)
        program = replace(program, run=run, kept=tuple(range(num_results)))
        return _Again.apply(program, num_results, *tensors), of_results


def _push(program: Program, num_inputs: int, given: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The tangents of the results, from the inputs and the tangents of those that are ``given``."""
    inputs, tangents = tensors[:num_inputs], tensors[num_inputs:]

    def of(*primals: Tensor) -> tuple[Tensor, ...]:
        return tuple(program.results(with_others(inputs, given, primals)))

    return [*tangents_of(of, [inputs[i] for i in given], tangents)]


@dataclass(frozen=True, eq=False)
class _Transpose:
    """The gradients of the ``wanted`` inputs, from the inputs and the gradients of the ``given`` results.

    ``behind``: the inputs behind which another mean is taken; ``by_grad``: whether ``fs.grad`` takes that of this one,
    or the gathers do.
    """

    program: Program
    num_inputs: int
    wanted: Sequence[int]
    given: Sequence[int]
    behind: Sequence[int]
    by_grad: bool

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        inputs, grads = tensors[: self.num_inputs], tensors[self.num_inputs :]
        differentiated = is_differentiated(tensors)
        if in_transform() or (differentiated and self.program.averages):
            return self._by_transform(inputs, grads, differentiated)
        # where it can be without torch.func, in which dropout of a tensor that is not contiguous draws other numbers
        with torch.enable_grad():
            leaves = [_leaf_of(inputs[i], differentiated) for i in self.wanted]
            results, anchors = self._results(inputs, leaves)
        pairs = [(x, grad) for x, grad in zip(results, grads, strict=True) if x.requires_grad]
        pairs += [(x, torch.ones_like(x)) for x in anchors if x.requires_grad]
        if not pairs:
            return [None] * len(leaves)
        outputs, seeds = zip(*pairs, strict=True)
        with self._noting_means(leaves):
            return [*gradients_or_none(outputs, seeds, leaves, differentiated)]

    def _by_transform(self, inputs: Sequence[Tensor], grads: Sequence[Tensor], again: bool) -> list[Tensor | None]:
        used: list[bool] = []
        kept: list[Tensor] = []

        def of(*leaves: Tensor) -> tuple[Tensor, ...]:
            results, _ = self._results(inputs, leaves)
            behind = leaves_behind(results)
            kept[:], used[:] = leaves, [id(x) in behind for x in leaves]
            return tuple(results)

        transpose = torch.func.vjp(of, *(inputs[i] for i in self.wanted))[1]
        with self._noting_means(kept):
            results = transpose(tuple(grads), retain_graph=False, create_graph=again)
        return [x if use else None for x, use in zip(results, used, strict=True)]

    def _results(self, inputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The given results, and anchors: Note [Unused units]."""
        for x in leaves:
            if x.is_leaf:
                x.grad_dtype = None  # as fs.grad has it, Note [Boundary]; autograd casts what this returns
        with new_boundary() if self.by_grad else no_boundary() as boundary:
            results = self.program.results(with_others(inputs, self.wanted, leaves))
        return [results[i] for i in self.given], [] if boundary is None else boundary.take_anchors()

    def _noting_means(self, leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
        behind = [leaf for i, leaf in zip(self.wanted, leaves, strict=True) if i in self.behind]
        return averaged_behind({id(leaf): leaf for leaf in behind})


def _leaf_of(x: Tensor, differentiated: bool) -> Tensor:
    """``x`` to differentiate with respect to; in its graph, if the gradient is differentiated again."""
    leaf = x.view_as(x) if differentiated else x.detach()
    return leaf if leaf.requires_grad else leaf.requires_grad_()


def with_others(tensors: Sequence[Tensor], places: Sequence[int], others: Sequence[Tensor]) -> list[Tensor]:
    """``tensors`` with ``others`` at ``places``."""
    replaced = dict(zip(places, others, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(tensors)]
