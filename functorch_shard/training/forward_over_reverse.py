"""Gradients inside of ``torch.func.jvp`` with the memory of ``backward()``: Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_internals.transforms import lacks_forward_mode, requires_grad_anywhere


def grad_and_value_freeing(fn: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
    """``torch.func.grad_and_value`` that frees activations as it proceeds, unless plain autograd records the result.

    Forward mode around it goes through backward as it goes through forward; nothing has to be kept for it. Without a
    graph torch uses the fused backward of some operators (SiLU, group norm), of which a few have no forward mode: then
    ``fn`` runs again, with a graph.
    """

    def gradient_and_value(inputs: Sequence[Tensor]) -> Any:
        value, pull, *rest = torch.func.vjp(fn, inputs, has_aux=has_aux)
        keep = torch.is_grad_enabled() and requires_grad_anywhere(value)
        try:
            (grads,) = pull(torch.ones_like(value), retain_graph=keep, create_graph=keep)
        except NotImplementedError as error:
            if keep or not lacks_forward_mode(error):
                raise
            return torch.func.grad_and_value(fn, has_aux=has_aux)(inputs)
        return grads, (value, *rest) if has_aux else value

    return gradient_and_value
