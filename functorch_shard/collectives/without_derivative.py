"""Results whose derivative raises: what is computed by copies into new memory, of values that may be differentiated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..torch_internals.autograd import Function, in_transform, is_functorch_wrapped_tensor
from .sinks import inside

CALLED_INSIDE = (
    "{}: called inside mesh.spmd, a torch.func transform or torch.compile, where a tree is one rank's or one row's. "
    "Call it outside, between steps: on simulated ranks with the stacked tree."
)


def refuse_derivatives(verb: str, tensors: Iterable[Tensor]) -> None:
    """Raise inside a transform, or if ``fs.grad`` differentiates by ``tensors``: what ``verb`` returns has no graph."""
    if in_transform():
        raise RuntimeError(CALLED_INSIDE.format(verb))
    if inside() and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{verb}: called inside fs.grad, of parameters that it differentiates by. What {verb} returns has no "
            "derivative. Call it outside, between steps, or pass detached shards."
        )


def constants(verb: str, results: Mapping[str, Tensor], sources: Iterable[Tensor]) -> dict[str, Tensor]:
    """``results`` without a graph, of ``sources``: inside a derivative by these, one that goes through them raises."""
    if not (in_transform() or (inside() and torch.is_grad_enabled())):
        return dict(results)
    return without_derivative(_CONSTANTS.format(verb), results, sources)


_CONSTANTS = "{}: its tensors have no derivative by the parameters. Use gather, or pass detached shards."


def without_derivative(message: str, results: Mapping[str, Tensor], sources: Iterable[Tensor]) -> dict[str, Tensor]:
    """``results`` of ``sources``: a derivative by these, which would be zero, raises ``message``."""
    tracked = [x for x in sources if x.requires_grad or is_functorch_wrapped_tensor(x)]
    if not tracked or not results:
        return dict(results)
    return dict(zip(results, _Refused.apply(message, len(results), *results.values(), *tracked), strict=True))


class _Refused(Function):
    """The identity of the first tensors, as functions of the others too."""

    @staticmethod
    def forward(message: str, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:number])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(ctx.message)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(ctx.message)

    @staticmethod
    def vmap(info: Any, in_dims: Any, message: str, number: int, *tensors: Tensor) -> Any:
        return _Refused.apply(message, number, *tensors), in_dims[2 : 2 + number]
