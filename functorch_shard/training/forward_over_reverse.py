"""Gradients inside of ``torch.func.jvp`` with the memory of ``backward()``: Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_internals.autograd import nodes
from ..torch_internals.transforms import lacks_forward_mode, requires_grad_anywhere

# Without a graph the backward of the first three reads the LU decomposition of forward, which has no tangent: the
# tangent of the gradient would be wrong in silence. With a graph it decomposes the matrix again. Dropout on a device
# has no forward mode without a graph, and a second run of the function would draw other random numbers.
_NEED_A_GRAPH = {"LinalgSolveExBackward0", "LinalgDetBackward0", "LinalgSlogdetBackward0", "NativeDropoutBackward0"}


def grad_and_value_freeing(fn: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
    """``torch.func.grad_and_value`` that frees activations as it proceeds, unless plain autograd records the result.

    Forward mode around it goes through backward as it goes through forward; nothing has to be kept for it. Without a
    graph torch uses the fused backward of some operators (SiLU, group norm), of which a few have no forward mode: then
    ``fn`` runs again, with a graph. Determinants, solutions of linear systems and dropout keep their graph in any case.
    """

    def gradient_and_value(inputs: Sequence[Tensor]) -> Any:
        needs_graph: list[bool] = []

        def looked_at(inputs: Sequence[Tensor]) -> Any:
            result = fn(inputs)
            needs_graph.append(_needs_a_graph(result[0] if has_aux else result))
            return result

        value, pull, *rest = torch.func.vjp(looked_at, inputs, has_aux=has_aux)
        recorded = torch.is_grad_enabled() and requires_grad_anywhere(value)
        keep = recorded or needs_graph[-1]
        try:
            (grads,) = pull(torch.ones_like(value), retain_graph=keep, create_graph=keep)
        except NotImplementedError as error:
            if keep or not lacks_forward_mode(error):
                raise
            return torch.func.grad_and_value(fn, has_aux=has_aux)(inputs)
        return grads, (value, *rest) if has_aux else value

    return gradient_and_value


def _needs_a_graph(value: Tensor) -> bool:
    return any(node.name() in _NEED_A_GRAPH for node in nodes(value.grad_fn))
